"""Scripts in processes of their own, without the seconds in which an interpreter loads torch."""

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent       # the repository
FORKS = multiprocessing.get_context('forkserver')
# packages alone: each script loads our modules anew, with the environment that it is given
FORKS.set_forkserver_preload(['torch.distributed.run', 'torch._dynamo', 'matplotlib.pyplot',
                              'pyarrow.parquet', 'safetensors.torch', 'sentencepiece',
                              'tokenizers', 'triton.language'])


class Script(FORKS.Process):
    """`python script *arguments` in `folder`; env: more environment variables."""

    def __init__(self, script, *arguments, folder=HERE, env=None):
        super().__init__()
        self.command, self.folder = [str(script), *map(str, arguments)], str(folder)
        self.env = os.environ | {'PYTHONPATH': self.folder} | (env or {})
        self.files = [tempfile.mkstemp()[1] for _ in range(2)]
        self.start()

    def run(self):
        """Run the script in this process."""
        for number, file in enumerate(self.files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.env)
        sys.argv = self.command
        sys.path[:] = [os.path.dirname(self.command[0]), self.folder, *(
            path for path in sys.path if path and not Path(path).is_relative_to(HERE))]
        try:
            runpy.run_path(self.command[0], run_name='__main__')
        finally:
            atexit._run_exitfuncs()

    def wait(self):
        """Return the exit status, as subprocess has it, and what the script printed."""
        self.join()
        printed = [Path(file).read_text() for file in self.files]
        for file in self.files:
            os.unlink(file)
        return subprocess.CompletedProcess(self.command, self.exitcode, *printed)


def run_scripts(n, script, *arguments, **options):
    """Run a script by n processes with the variables that torchrun gives to them.

    Return the exit status of the first one that failed, or 0, and what all of them printed.
    """
    with socket.create_server(('localhost', 0)) as server:
        shared = {'WORLD_SIZE': n, 'LOCAL_WORLD_SIZE': n, 'MASTER_ADDR': 'localhost',
                  'MASTER_PORT': server.getsockname()[1], 'TORCHELASTIC_RUN_ID': 'tests'}
    scripts = [Script(script, *arguments, env={
        key: str(value) for key, value in (shared | {'RANK': i, 'LOCAL_RANK': i}).items()
    }, **options) for i in range(n)] if n > 1 else [Script(script, *arguments, **options)]
    done = [script.wait() for script in scripts]
    code = next(filter(None, (each.returncode for each in done)), 0)
    return subprocess.CompletedProcess(script, code, *(
        ''.join(getattr(each, stream) for each in done) for stream in ('stdout', 'stderr')))


def torchrun(*command):
    """Run a script by two processes of torchrun, which names one that fails and ends the other."""
    import torch.distributed.run
    # after -- because torchrun takes --n=2 for an option of its own
    return run_scripts(1, torch.distributed.run.__file__, '--nproc_per_node=2',
                       '--rdzv_backend=c10d', '--rdzv_endpoint=localhost:0', '--', *command)


def steps_done(folder):
    """The number of logged steps, or -1 before there is a log."""
    log = folder / 'log.jsonl'
    return len(log.read_text().splitlines()) if log.exists() else -1


def await_steps(script, folder, n):
    """Waits until `n` steps are logged, or the script has ended."""
    while script.is_alive() and steps_done(folder) < n:
        time.sleep(0.01)
