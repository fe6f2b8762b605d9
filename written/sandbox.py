"""Run a program that a model wrote, and test it, where it harms neither the machine nor the test.

sandbox_child.py isolates it; docs/running_code.md says what that cannot prevent.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from runtime.errors import ConfigError
from written.sandbox_child import MACHINES

CHILD = Path(__file__).with_name('sandbox_child.py')
ISOLATIONS = 'namespaces', 'limits'


class Outcome(NamedTuple):
    passed: bool        # the source ran to its end and every test passed
    reason: str         # '' or, in one line, why not


def require_sandbox(isolation):
    """Raise ConfigError unless a program can be run here."""
    outcome = run_program('', 'pass', isolation=isolation)
    if not outcome.passed:
        raise ConfigError(f'not even an empty program can be run here: {outcome.reason}')


def remove_content(folder):
    """Remove all in a folder, however deep: what is in a subfolder moves up before."""
    with contextlib.suppress(OSError):      # TemporaryDirectory tries again
        while paths := [entry.path for entry in os.scandir(folder)]:
            for path in paths:
                if os.path.islink(path) or not os.path.isdir(path):
                    os.unlink(path)
                    continue
                os.chmod(path, 0o700)
                for entry in [*os.scandir(path)]:
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)     # it must be writable to be moved
                    os.rename(entry.path, os.path.join(folder, secrets.token_hex()))
                os.rmdir(path)


def run_program(source, tests, *, seconds=3, wall_seconds=None, memory=1 << 29, disk=1 << 24,
                isolation='namespaces'):
    """Run the Python program `source`, then `tests`; return an Outcome.

    tests:        Python that calls what the source defines, as in `assert program.add(2, 3) == 5`,
                  in a process of its own. Arguments and results are plain values
    seconds:      CPU time of the program, a whole number
    wall_seconds: time for all, for programs that sleep; None: 10 + 4 * seconds
    memory, disk: bytes of address space, and of files in /tmp; with 'limits', `disk` is for each
                  file and not for their sum
    isolation:    'namespaces': no file of this machine but the Python installation, no network, no
                  other process. 'limits', for containers that forbid namespaces: the program can
                  read and write what the user can

    Only the standard library can be imported. Raises ConfigError if isolation is impossible.
    """
    if sys.platform != 'linux' or os.uname().machine not in MACHINES:
        raise ConfigError(f'running code needs Linux on {" or ".join(MACHINES)}')
    if isolation not in ISOLATIONS:
        raise ConfigError(f'isolation = {isolation!r}; it must be {" or ".join(ISOLATIONS)}')
    wall_seconds = wall_seconds or 10 + 4 * seconds
    token = secrets.token_hex()
    with tempfile.TemporaryDirectory(prefix='nanocal-', ignore_cleanup_errors=True) as folder:
        home = '/tmp' if isolation == 'namespaces' else folder
        prefixes = {sys.base_prefix, sys.base_exec_prefix}
        visible = {'/usr', '/lib', '/lib64', *prefixes, *map(os.path.realpath, prefixes)}
        request = {'source': source, 'seconds': seconds, 'memory': memory, 'disk': disk,
                   'isolation': isolation, 'folder': folder,
                   'visible': sorted(filter(os.path.exists, visible))}
        process = subprocess.Popen(
            [sys.executable, '-S', '-s', '-P', '-B', CHILD], cwd=folder, start_new_session=True,
            env={'HOME': home, 'TMPDIR': home, 'LANG': 'C.UTF-8', 'PYTHONHASHSEED': '0'},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        messages = [json.dumps(x) + '\n' for x in (request, {'tests': tests, 'token': token})]
        try:
            verdict, errors = process.communicate(''.join(messages).encode(), wall_seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f'more than {wall_seconds:g} s')
        finally:
            if process.poll() is None:      # and whatever it started: the session is its own
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
            remove_content(folder)
    if not verdict:
        line = (errors.decode(errors='replace').splitlines() or ['no verdict'])[-1]
        if line.startswith('cannot isolate'):
            raise ConfigError(
                f'{line}: this machine does not let you isolate a program; allow namespaces or, in '
                f'a disposable container, add --isolation=limits (docs/running_code.md)')
        return Outcome(False, line)
    verdict = json.loads(verdict)
    reason = ''.join(c if c.isprintable() else '\ufffd' for c in verdict['reason'][:300])
    return Outcome(verdict['passed'] and verdict['token'] == token, reason)
