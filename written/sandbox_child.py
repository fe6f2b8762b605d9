"""The process that sandbox.py starts: it isolates itself, then runs a program and tests it.

    launcher    receives the program and the limits; enters new namespaces with a file system of its
                own and without rights
    tester      the first process in there; only after the fork of the program does it receive the
                tests and a token, so neither is ever in the program's memory
    program     has limits and a filter of system calls, and answers the tester's calls

Tester and program exchange plain values over two pipes, a line of JSON each, so a program cannot
return an object that claims to equal everything. Nothing of ours is imported.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import traceback
import types

LIBC = ctypes.CDLL(None, use_errno=True)
MACHINES = 'x86_64', 'aarch64'
NOBODY = 65534
MOST_MESSAGE = 1 << 24      # bytes of one message from the program

# ---- Messages ------------------------------------------------------------------------------------

KINDS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, bytes, dict, complex)}


def to_json(x):
    """Return a plain value as JSON can hold it; a subclass becomes its base. Raises TypeError."""
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    for name, kind in KINDS.items():
        if isinstance(x, kind):
            parts = x.items() if kind is dict else (x.real, x.imag) if kind is complex else x
            return {name: [to_json(part) for part in parts]}
    raise TypeError(f'a value of type {type(x).__name__} cannot be compared; wanted numbers, '
                    f'strings, lists, tuples, sets, dicts or None')


def from_json(x):
    """Return the value that `to_json` was given."""
    if not isinstance(x, dict):
        return x
    (name, parts), = x.items()
    parts = [*map(from_json, parts)]
    return complex(*parts) if name == 'complex' else KINDS[name](parts)


def send(file, message):
    """Write a message, one line of JSON."""
    file.write(json.dumps(message).encode() + b'\n')
    file.flush()


def receive(file, most=-1):
    """Read a message of at most `most` bytes; raises EOFError if the other side has ended."""
    line = file.readline(most)
    if not line.endswith(b'\n'):
        raise (ValueError(f'a message of more than {most} bytes') if len(line) == most else
               EOFError('the other process has ended'))
    return json.loads(line)


def one_line(error):
    """Return an exception as one line."""
    return f'{type(error).__name__}: {error}'.splitlines()[0].removesuffix(': ')[:300]


# ---- Isolation: system calls of Linux, with the constants of its headers -------------------------

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
RDONLY, NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 1, 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
AT_FDCWD, AT_RECURSIVE, DETACH = -100, 0x8000, 2
MOUNT_SETATTR = 442     # not every C library has a function for this call
PDEATHSIG, DUMPABLE, SECCOMP, NO_NEW_PRIVS = 1, 4, 22, 38       # of prctl

# the calls that a program may not make, {name: (x86_64, aarch64)}; without those that start
# processes and threads, limits per process hold for the whole program
DENIED = {
    'fork': (57, None), 'vfork': (58, None), 'clone': (56, 220), 'execve': (59, 221),
    'execveat': (322, 281), 'kill': (62, 129), 'tkill': (200, 130), 'tgkill': (234, 131),
    'rt_sigqueueinfo': (129, 138), 'rt_tgsigqueueinfo': (297, 240), 'ptrace': (101, 117),
    'process_vm_readv': (310, 270), 'process_vm_writev': (311, 271), 'kcmp': (312, 272),
    'unshare': (272, 97), 'setns': (308, 268), 'mount': (165, 40), 'umount2': (166, 39),
    'pivot_root': (155, 41), 'chroot': (161, 51), 'open_by_handle_at': (304, 265),
    'bpf': (321, 280), 'perf_event_open': (298, 241), 'userfaultfd': (323, 282),
    'setsid': (112, 157), 'setpgid': (109, 154), 'personality': (135, 92), 'keyctl': (250, 219),
    'add_key': (248, 217), 'request_key': (249, 218), 'init_module': (175, 105),
    'finit_module': (313, 273), 'prlimit64': (302, 261), 'socket': (41, 198),
    # the program would outlive the tester, or be traced
    'prctl': (157, 167), 'setuid': (105, 146), 'setgid': (106, 144), 'setreuid': (113, 145),
    'setregid': (114, 143), 'setresuid': (117, 147), 'setresgid': (119, 149),
    'setfsuid': (122, 151), 'setfsgid': (123, 152), 'capset': (126, 91),
    # priority, processors and memory of other processes
    'setpriority': (141, 140), 'ioprio_set': (251, 30), 'sched_setaffinity': (203, 122),
    'sched_setparam': (142, 118), 'sched_setscheduler': (144, 119), 'sched_setattr': (314, 274),
    'migrate_pages': (256, 238), 'move_pages': (279, 239),
    # memory that RLIMIT_AS does not count
    'memfd_create': (319, 279), 'shmget': (29, 194), 'msgget': (68, 186), 'semget': (64, 190),
    'mq_open': (240, 180), 'io_setup': (206, 0),
}
# calls whose second argument must be one of these, {name: ((x86_64, aarch64), values)}; others
# reach other programs: signals (F_SETOWN, F_SETSIG, FIOSETOWN, SIOCSPGRP), leases, datagrams
COMMANDS = {
    # duplicates, flags and locks
    'fcntl': ((72, 25), (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    'ioctl': ((16, 29), (0x5401, 0x5413, 0x541b, 0x5421, 0x5450, 0x5451)),
    # SOCK_STREAM, with SOCK_CLOEXEC, SOCK_NONBLOCK or both: a pair that no other socket can join
    'socketpair': ((53, 199), (1, 0x80001, 0x801, 0x80801)),
}
SETFL, ASYNC = 4, 0x2000    # nor may fcntl set O_ASYNC: on a terminal, its processes get signals
NEWER = 424     # and no call of Linux 5.1 or later, such as io_uring and clone3: ENOSYS


def libc(name, *arguments):
    """Call a function of the C library with pointers, texts and numbers; raises OSError."""
    arguments = [ctypes.c_long(x) if isinstance(x, int) else
                 x.encode() if isinstance(x, str) else x for x in arguments]
    if getattr(LIBC, name)(*arguments) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f'{name}: {os.strerror(error)}')


def enter_namespaces(root, visible, disk):
    """Enter new namespaces; return in their first process, for which this one waits.

    root: an empty folder that becomes '/'; visible: folders that stay; disk: bytes of /tmp
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid:     # a user namespace gives the rights that the next calls need
        libc('unshare', NEWUSER)
        for file, text in (('setgroups', 'deny'), ('uid_map', f'{uid} {uid} 1'),
                           ('gid_map', f'{gid} {gid} 1')):
            with open(f'/proc/self/{file}', 'w') as f:
                f.write(text)
    libc('unshare', NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET)
    end_with_parent()
    if first := os.fork():      # a new process namespace begins with a child
        os._exit(0 if os.waitpid(first, 0)[1] == 0 else 1)

    libc('mount', 'none', '/', None, REC | PRIVATE, None)
    libc('mount', 'tmpfs', root, 'tmpfs', NOSUID | NODEV, 'size=1m,nr_inodes=1000,mode=755')
    for path in visible:
        inside = root + path
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if not os.path.islink(path):
            os.makedirs(inside, exist_ok=True)
            libc('mount', path, inside, None, BIND | REC, None)
        elif not os.path.lexists(inside):       # /lib -> usr/lib
            os.symlink(os.readlink(path), inside)
    devices = '/dev/null', '/dev/zero', '/dev/urandom'
    os.mkdir(f'{root}/tmp')
    os.mkdir(f'{root}/dev')
    for path in devices:
        open(root + path, 'w').close()
    attributes = struct.pack('<QQQQ', RDONLY | NOSUID | NODEV, 0, 0, 0)
    libc('syscall', MOUNT_SETATTR, AT_FDCWD, root, AT_RECURSIVE, attributes, len(attributes))
    for path in devices:
        libc('mount', path, root + path, None, BIND, None)
    libc('mount', 'tmpfs', f'{root}/tmp', 'tmpfs', NOSUID | NODEV | NOEXEC,
         f'size={disk},nr_inodes=1000,mode=1777')
    os.chdir(root)
    libc('pivot_root', '.', '.')        # the old root lies over the new one, until
    libc('umount2', '.', DETACH)
    os.chdir('/tmp')

    if not uid:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def end_with_parent():
    """Let the kernel kill this process when its parent ends, unless its user or rights change."""
    libc('prctl', PDEATHSIG, signal.SIGKILL)


def filter_calls():
    """Deny this process the system calls above, by a program of the kernel's packet filter."""
    column = MACHINES.index(os.uname().machine)
    # each instruction: operation, lines to skip if true, if false, operand
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    number, second, third = 0, 24, 32       # offsets of the call's number and of two arguments
    allow, kill, eperm, enosys = 0x7fff0000, 0x80000000, 0x50001, 0x50026
    program = [(load, 0, 0, 4), (equal, 1, 0, (0xc000003e, 0xc00000b7)[column]), (end, 0, 0, kill),
               (load, 0, 0, number), (at_least, 0, 1, NEWER), (end, 0, 0, enosys)]
    for numbers in DENIED.values():
        if numbers[column] is not None:
            program += [(equal, 0, 1, numbers[column]), (end, 0, 0, eperm)]
    for numbers, values in COMMANDS.values():
        check = [(load, 0, 0, second)]
        check += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)]
        check += [(end, 0, 0, eperm), (equal, 1, 0, SETFL), (end, 0, 0, allow),
                  (load, 0, 0, third), (any_bit, 0, 1, ASYNC), (end, 0, 0, eperm),
                  (end, 0, 0, allow)]
        program += [(equal, 0, len(check), numbers[column]), *check]
    program.append((end, 0, 0, allow))
    code = ctypes.create_string_buffer(b''.join(struct.pack('<HBBI', *line) for line in program))
    libc('prctl', SECCOMP, 2, struct.pack('<HxxxxxxQ', len(program), ctypes.addressof(code)), 0, 0)


def limit_resources(**limits):
    """Set limits: AS and FSIZE in bytes, CPU in seconds, NOFILE and NPROC in numbers."""
    for name, most in limits.items():
        kind = getattr(resource, f'RLIMIT_{name}')
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


# ---- The program ---------------------------------------------------------------------------------

def serve(source, calls, answers):
    """Run the source, then answer calls of what it defines until the other side ends."""
    program = types.ModuleType('program')
    sys.modules['program'] = program
    sys.argv = ['program']

    def run_source():
        exec(compile(source, 'program.py', 'exec'), program.__dict__)

    name = None
    arguments, keywords = (), {}
    while True:
        try:
            function = getattr(program, name) if name else run_source
            answer = {'value': to_json(function(*arguments, **keywords))}
            json.dumps(answer)              # a whole number may have too many digits
        except BaseException as error:      # also SystemExit: what it ends is not the tests
            answer = {'error': one_line(error)}
        sys.stdout.flush()
        sys.stderr.flush()
        send(answers, answer)
        name, arguments, keywords = from_json(receive(calls))


# ---- The tester ----------------------------------------------------------------------------------

class ProgramError(Exception):
    """The program raised an exception, or answered with something else than a value."""


class Program:
    """What the tests see of the program: its functions, which run in the other process."""

    def __init__(self, calls, answers):
        self._calls, self._answers = calls, answers

    def __getattr__(self, name):
        def function(*arguments, **keywords):
            send(self._calls, to_json([name, arguments, keywords]))
            return self._answer()
        return function

    def _answer(self):
        answer = receive(self._answers, MOST_MESSAGE)
        if 'error' in answer:
            raise ProgramError(answer['error'])
        return from_json(answer['value'])


def test(program, tests):
    """Return (whether all passed, why not); None for why not: the program closed its pipe."""
    try:
        program._answer()
        exec(compile(tests, 'tests', 'exec'), {'__name__': 'tests', 'program': program})
    except (EOFError, BrokenPipeError):
        return False, None
    except ProgramError as error:
        return False, str(error)
    except BaseException as error:
        lines = [number for caller, number in traceback.walk_tb(error.__traceback__)
                 if caller.f_code.co_filename == 'tests']
        line = tests.splitlines()[lines[-1] - 1].strip() if lines else ''
        return False, f'{one_line(error)}: {line}'.removesuffix(': ')
    return True, ''


def main():
    # without a buffer, which would bring the tests into the memory of the program
    stdin, verdict = open(0, 'rb', 0), open(os.dup(1), 'wb')
    request = receive(stdin)
    try:
        if request['isolation'] == 'namespaces':
            enter_namespaces(request['folder'], request['visible'], request['disk'])
        # drop every capability for good, and let no other process read this one's memory
        libc('prctl', NO_NEW_PRIVS, 1, 0, 0, 0)
        libc('capset', struct.pack('<Ii', 0x20080522, 0), bytes(24))
        libc('prctl', DUMPABLE, 0, 0, 0, 0)
        end_with_parent()
    except Exception as error:      # also of a C library that lacks a function
        sys.exit(f'cannot isolate: {one_line(error)}')
    limit_resources(AS=request['memory'], CORE=0, MEMLOCK=0, MSGQUEUE=0, SIGPENDING=100)
    null = os.open('/dev/null', os.O_RDWR)
    call_read, call_write, answer_read, answer_write = (
        open(fd, mode) for pipe in (os.pipe(), os.pipe()) for fd, mode in zip(pipe, ('rb', 'wb')))

    pid = os.fork()
    if not pid:
        for fd in range(3):     # what the program prints is of no use
            os.dup2(null, fd)
        for fd in (null, verdict.fileno(), call_write.fileno(), answer_read.fileno()):
            os.close(fd)
        try:
            end_with_parent()
            limit_resources(CPU=request['seconds'], FSIZE=request['disk'], NOFILE=32, NPROC=1)
            filter_calls()
        except Exception as error:
            send(answer_write, one_line(error))
            os._exit(1)
        send(answer_write, '')      # isolated; later messages may be the program's
        serve(request['source'], call_read, answer_write)
    call_read.close()
    answer_write.close()
    if problem := receive(answer_read):
        sys.exit(f'cannot isolate: {problem}')
    secret = receive(stdin)
    os.dup2(null, 1)        # what tests print is no verdict
    passed, reason = test(Program(call_write, answer_read), secret['tests'])
    if reason is None:
        _, status = os.waitpid(pid, 0)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        reason = (f'more than {request["seconds"]} s of CPU time'
                  if used.ru_utime + used.ru_stime > 0.8 * request['seconds'] else
                  f'killed by {signal.Signals(os.WTERMSIG(status)).name}'
                  if os.WIFSIGNALED(status) else
                  f'ended with status {os.WEXITSTATUS(status)} before the tests did')
    send(verdict, {'token': secret['token'], 'passed': passed, 'reason': reason})
    os._exit(0)     # the program ends with this process


if __name__ == '__main__':
    main()
