"""written/sandbox.py and written/code_tasks.py: right programs pass; hostile ones neither pass nor
escape."""

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from common import HERE, SHARED, cases_of, needs_files, write_rows

from written import code_tasks
from written.code_tasks import Problem, check, load_problems, solution_source
from written.benchmarks import WRITTEN_TASKS
from runtime.errors import ConfigError, DataError
from written.sandbox import ISOLATIONS, Outcome, require_sandbox, run_program

if sys.platform != 'linux':
    pytest.skip('running code needs Linux', allow_module_level=True)

TESTS = 'assert program.add(2, 3) == 5\nassert program.add(-1, 1) == 0'


@pytest.fixture(scope='module')
def namespaces():
    try:
        require_sandbox('namespaces')
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(params=ISOLATIONS)
def isolation(request):
    """Each isolation, if this machine allows it."""
    if request.param == 'namespaces':
        request.getfixturevalue('namespaces')
    return request.param


# ---- Programs that harm --------------------------------------------------------------------------

PROGRAMS = cases_of('sandbox_programs.toml')
HOSTILE, REACHING = PROGRAMS['hostile'], PROGRAMS['reaching']
# not where a mistake in the locks would hurt the machine
ONLY_IN_NAMESPACES = {'threads', 'asks for new rights'}
LONG = {'hangs in C', 'closes its pipes and sleeps', 'ignores signals'}


@pytest.mark.parametrize('isolation, name', [
    pytest.param(isolation, name, marks=[pytest.mark.slow] * (isolation == 'limits'
                                                              or name in LONG))
    for isolation in ISOLATIONS for name in HOSTILE
    if isolation == 'namespaces' or name not in ONLY_IN_NAMESPACES], indirect=['isolation'])
def test_a_hostile_program_does_not_pass(isolation, name):
    # beside other processes, a second may end before the memory
    outcome = run_program(HOSTILE[name]['source'], TESTS, seconds=10 if 'memory' in name else 1,
                          wall_seconds=1 if 'sleeps' in name else 20, isolation=isolation)
    assert not outcome.passed and re.search(HOSTILE[name]['reason'], outcome.reason), outcome


def test_deeply_nested_folders_are_removed_and_no_socket_outside_is_reached(tmp_path, monkeypatch):
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path / 'programs'))
    (tmp_path / 'programs').mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outside:
        outside.bind(str(tmp_path / 's'))
        outside.setblocking(False)
        source = REACHING['nested folders and a socket outside']
        outcome = run_program(source.replace('$path', str(tmp_path / 's')), TESTS,
                              isolation='limits')
        assert outcome.passed, outcome
        with pytest.raises(BlockingIOError):
            outside.recv(3)
    assert not [*(tmp_path / 'programs').iterdir()]


# ---- Programs that want out ----------------------------------------------------------------------

def attempt(expression, before='import os'):
    """Return what `expression` gives inside: its value, or the name of the exception."""
    source = (f'{before}\ndef attempt():\n    try: return repr(({expression}))\n'
              f'    except BaseException as error: return type(error).__name__')
    outcome = run_program(source, 'raise ValueError(program.attempt())')
    return re.fullmatch('ValueError: (.*): raise ValueError.*', outcome.reason)[1]


def test_no_file_of_the_user_can_be_read_and_only_tmp_written(tmp_path, namespaces, monkeypatch):
    secret = tmp_path / 'secret'
    secret.write_text('secret')
    for expression in (f'open({str(secret)!r}).read()', f'open({str(tmp_path / "new")!r}, "w")',
                       'os.listdir("/proc")', 'os.listdir("/etc")',
                       f'open("/tmp/../../..{tmp_path}/new", "w")',
                       f'os.symlink({str(tmp_path)!r}, "/tmp/link") or open("/tmp/link/new", "w")'):
        assert attempt(expression) == 'FileNotFoundError', expression
    for folder in ('/', '/usr/lib', '/dev', sys.base_prefix):
        assert attempt(f'open("{folder}/new", "w")') in ('OSError', 'PermissionError'), folder
    home, python = os.path.realpath(os.path.expanduser('~')), os.path.realpath(sys.base_prefix)
    assert attempt(f'[f for f, _, files in os.walk({home!r}) if files '
                   f'and not f.startswith({(sys.base_prefix, python)})]') == '[]'
    assert [*tmp_path.iterdir()] == [secret]
    assert attempt('open("/tmp/new", "w").write("new")') == '3'
    assert attempt('os.listdir("/tmp")') == '[]'        # a new one for each program
    outcome = run_program('for i in range(10 ** 6): open(f"/tmp/{i}", "wb").write(bytes(5000))',
                          'pass')
    assert outcome.reason.startswith('OSError: [Errno 28]')     # a full disk
    monkeypatch.setenv('HF_TOKEN', 'hf_secret')
    assert 'hf_secret' not in attempt('os.environ')
    assert attempt('input()') == 'EOFError'
    with open(HERE / 'LICENSE') as file:
        os.set_inheritable(file.fileno(), True)
        # the standard ones and two pipes
        assert len(eval(attempt('[*fds()]', REACHING['open files']))) == 5


def test_calls_that_reach_other_processes_are_denied_by_argument(isolation):
    denied = [(numbers[os.uname().machine == 'aarch64'], *arguments)
              for numbers, *calls in PROGRAMS['denied'].values() for arguments in calls]
    calls = ', '.join(f'({", ".join(map(str, call))})' for call in denied)
    source = REACHING['denied calls'].replace('$calls', calls)
    outcome = run_program(source, 'raise ValueError(program.outcomes())', isolation=isolation)
    assert eval(re.match(r'ValueError: (\[.*\])', outcome.reason)[1]) == [(-1, 1)] * len(denied)


def test_no_process_or_connection_is_reached(namespaces):
    assert attempt('os.getpid(), os.getppid()') == '(2, 1)'
    for pid in ('os.getppid()', os.getpid(), -1):
        assert attempt(f'os.kill({pid}, signal.SIGKILL)', 'import os, signal') == 'PermissionError'
    with socket.create_server(('127.0.0.1', 0)) as server:
        for expression in ('socket.create_connection(address)', 'socket.socket(socket.AF_VSOCK)'):
            assert attempt(expression, f'import socket\naddress = {server.getsockname()!r}'
                           ) == 'PermissionError'
    if os.uname().machine == 'x86_64':
        outcome = run_program(REACHING['calls of another architecture'], TESTS)
        assert not outcome.passed and outcome.reason == 'killed by SIGSYS'


def descendants(pid):
    """Return the processes below `pid` that are alive."""
    children = [int(path.name) for path in Path('/proc').glob('[0-9]*') if running(path)[1] == pid]
    return children + [x for child in children for x in descendants(child)]


def running(path):
    """Return (state, parent) of a process by its folder in /proc."""
    try:
        state, parent = (path / 'stat').read_text().rpartition(')')[2].split()[:2]
    except OSError:
        return 'Z', 0
    return state, int(parent)


@pytest.mark.slow
def test_nothing_outlives_a_killed_evaluation(isolation):
    code = (f'from written.sandbox import run_program\n'
            f'run_program("import time; time.sleep(1000)", "pass", isolation={isolation!r})')
    host = subprocess.Popen([sys.executable, '-c', code], cwd=HERE)
    while len(family := descendants(host.pid)) < {'namespaces': 3, 'limits': 2}[isolation]:
        assert host.poll() is None
        time.sleep(0.05)
    time.sleep(0.3)         # the last of them is in its place
    host.kill()
    host.wait()
    deadline = time.time() + 5
    while alive := [pid for pid in family if running(Path(f'/proc/{pid}'))[0] != 'Z']:
        assert time.time() < deadline, alive
        time.sleep(0.05)


# ---- Programs that are right ---------------------------------------------------------------------

def test_a_right_program_passes(isolation):
    outcome = run_program(PROGRAMS['right'], TESTS, isolation=isolation)
    assert outcome == (True, '')
    for body, reason in (('a * b', 'AssertionError: assert program.add(2, 3) == 5'),
                         ('a +', 'SyntaxError: invalid syntax (program.py, line 1)')):
        outcome = run_program(f'def add(a, b): return {body}', TESTS, isolation=isolation)
        assert outcome == (False, reason)
    for tests, right in (('import os; os._exit(0)', False), ('print("x" * 99999)', True)):
        assert run_program('', tests, isolation=isolation).passed is right
    outcome = run_program('raise ValueError("\\x1b[31m\\ud800 red")', 'pass', isolation=isolation)
    assert outcome.reason == 'ValueError: \ufffd[31m\ufffd red'    # on a terminal


def test_without_namespaces_nothing_is_run(tmp_path, monkeypatch):
    ran, child = tmp_path / 'ran', tmp_path / 'child.py'
    source = (HERE / 'written' / 'sandbox_child.py').read_text()
    monkeypatch.setattr('written.sandbox.CHILD', child)
    for old, new, isolation, message in (
            ("libc('unshare',", "libc('unshare', -1 |", 'namespaces', 'unshare: Invalid arg'),
            ("libc('prctl', SECCOMP,", "libc('prctl', -1,", 'limits', 'prctl'),
            ("libc('capset',", "libc('no_such_function',", 'limits', 'no_such_function')):
        assert old in source
        child.write_text(source.replace(old, new))
        with pytest.raises(ConfigError, match=f'cannot isolate: .*{message}'):
            run_program(f'open({str(ran)!r}, "w")', 'pass', isolation=isolation)
    child.write_text('raise ImportError("what?")')
    with pytest.raises(ConfigError, match='not even an empty program .*: ImportError: what'):
        require_sandbox('limits')
    assert not ran.exists()


# ---- Problems ------------------------------------------------------------------------------------

AREA = PROGRAMS['problems']['area']
PROBLEM = Problem(AREA['task_id'], AREA['prompt'], AREA['entry_point'], AREA['test'])
ANSWERS = cases_of('code_answers.toml')


@pytest.mark.parametrize('text, right', [
    (text, name == 'right') for name, texts in ANSWERS.items() for text in texts])
def test_a_text_becomes_a_program(text, right, namespaces):
    assert check(PROBLEM, text)[0] is right, solution_source(PROBLEM, text)


@pytest.mark.parametrize('name', PROGRAMS['tests'])
def test_a_row_with_broken_tests_is_refused(name, tmp_path):
    case = PROGRAMS['tests'][name]
    row = {'task_id': 'a', 'prompt': case.get('prompt', 'def f(x):\n    "a"\n'),
           'entry_point': 'f', 'test': case['test']}
    path = write_rows(tmp_path / 'mine.jsonl', [row])
    if 'refused' in case:
        with pytest.raises(DataError, match=f'mine.jsonl:1: .*{case["refused"]}'):
            load_problems(str(path))
    else:
        assert load_problems(str(path))[0].tests == row['test']


@pytest.mark.slow
def test_the_solutions_of_humaneval_pass_and_trivial_ones_fail(namespaces):
    needs_files('datasets/humaneval/HumanEval.jsonl.gz')
    problems = load_problems(str(SHARED / 'datasets' / 'humaneval'))
    assert len(problems) == 164
    jobs = [(p, p.solution, True) for p in problems[::4]]
    for p in problems[::16]:
        jobs += [(p, f'Here it is:\n```python\n{p.prompt}{p.solution}```\nDone.', True),
                 (p, '    return None\n', False), (p, '    import os; os._exit(0)\n', False)]
    with ThreadPoolExecutor() as pool:
        verdicts = pool.map(lambda job: check(*job[:2])[0], jobs)
        assert [job[:2] for job, right in zip(jobs, verdicts) if right is not job[2]] == []


def test_the_task_uses_the_isolation_that_is_asked_for(monkeypatch):
    used = []
    monkeypatch.setattr(code_tasks, 'run_program',
                        lambda *_, isolation: used.append(isolation) or Outcome(False, ''))
    check.cache_clear()
    WRITTEN_TASKS['humaneval'].grade('    return 1', [*PROBLEM], isolation='limits')
    check.cache_clear()
    assert used == ['limits']
