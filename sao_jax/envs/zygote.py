"""The process that judged programs are forked from: `python -sP [-S] zygote.py [MODULE ROOT]`. Standard library only.

It reads one request per line from stdin and writes one reply per line to stdout (JSON). For each request it forks a
child, which runs the program under its limits and reports over a private pipe what each call returned; a fork of this
small process costs a millisecond, an interpreter twenty or more. With MODULE, found below ROOT, the calls go to
functions of that trusted module instead, which is imported once.

A child is a session of its own, with rlimits on memory, file size, core dumps and CPU time and a wall clock that ends
it with SIGKILL. It is also confined by a seccomp filter (Linux on x86_64 and aarch64): what is not in the short list of
allowed system calls fails with EPERM, so there are no sockets, further processes, threads or signals to others and no
files (a trusted module, which may import what it needs, reads but does not write them); a program can import what is
loaded already (`_LOADED`). Elsewhere, the process tree is killed as far as it can be found: the session, and on Linux
also descendants that left it.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import platform
import random
import resource
import select
import signal
import sys
import time

# Modules that programs may import.
_LOADED = (
    *("bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools"),
    *("heapq", "io", "itertools", "math", "numbers", "operator", "random", "re", "statistics", "string", "time"),
    *("types", "typing"),
)

_CHUNK = 65536
_VALUES, _STDOUT, _STDERR = 3, 1, 2  # descriptors in the child
_PDEATHSIG, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 22, 36, 38  # of prctl

# Per machine: its audit number; read write close fstat lseek mmap mprotect munmap brk rt_sigreturn sched_yield mremap
# madvise writev getpid exit gettimeofday futex restart_syscall clock_gettime clock_getres exit_group; openat, to read
# only; newfstatat getdents64 readlinkat ioctl fcntl getcwd statx gettid pread64.
_SYSCALLS = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 5, 8, 9, 10, 11, 12, 15, 24, 25, 28, 20, 39, 60, 96, 202, 219, 228, 229, 231),
        257,
        (262, 217, 267, 16, 72, 79, 332, 186, 17, 4, 6, 89),  # and stat lstat readlink
    ),
    "aarch64": (
        0xC00000B7,
        (63, 64, 57, 80, 62, 222, 226, 215, 214, 139, 124, 216, 233, 66, 172, 93, 169, 98, 128, 113, 114, 94),
        56,
        (79, 61, 78, 29, 25, 17, 291, 178, 67),
    ),
}

_LIBC = ctypes.CDLL(None)


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def _filter(reading):
    """The seccomp program, or None where there is none for this machine. With `reading`, files can be read."""
    if sys.platform != "linux" or platform.machine() not in _SYSCALLS:
        return None
    arch, allowed, openat, more = _SYSCALLS[platform.machine()]
    load, equal, bits, give = 0x20, 0x15, 0x45, 0x06  # offsets 0, 4, 32: number, machine, third argument
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, 0x80000000), (load, 0, 0, 0)]
    tail = [(give, 0, 0, 0x00050001), (give, 0, 0, 0x7FFF0000)]  # EPERM, allow
    if reading:
        allowed += more
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        tail = [(equal, 0, 2, openat), (load, 0, 0, 32), (bits, 0, 1, writes), *tail]
    code += [(equal, len(allowed) - i + len(tail) - 2, 0, number) for i, number in enumerate(allowed)] + tail
    packed = b"".join(
        op.to_bytes(2, sys.byteorder) + bytes([yes, no]) + value.to_bytes(4, sys.byteorder)
        for op, yes, no, value in code
    )
    buffer = ctypes.create_string_buffer(packed)
    filter_ = _Filter(len(code), ctypes.addressof(buffer))
    filter_.buffer = buffer  # keeps it alive
    return filter_


def _prctl(option, value=0, pointer=None):
    if sys.platform != "linux":
        return -1
    return _LIBC.prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0))


def _confine(filter_):
    """True if this process can from now on make no system call outside the list."""
    return (
        filter_ is not None
        and _prctl(_NO_NEW_PRIVS, 1) == 0
        and _prctl(_SECCOMP, 2, ctypes.byref(filter_)) == 0  # 2: filter
    )


def _plain(value):
    """The value as data that JSON can hold, tuples as lists. Raises TypeError for anything else, subclasses too."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [_plain(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError(f"{kind.__name__} is no plain data")


def _report(value=None, error=""):
    data = json.dumps({"value": value, "error": error}).encode() + b"\n"
    while data:
        data = data[os.write(_VALUES, data) :]


def _describe(error):
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except BaseException:  # a program's own exception may fail to describe itself
        return "exception"


def _run(request, namespace):
    """Runs the program and reports each call; returns the exit status."""
    try:
        if request["source"] is not None:
            exec(compile(request["source"], "<program>", "exec"), namespace)
    except SystemExit as error:
        return error.code if type(error.code) is int else int(error.code is not None)
    except BaseException as error:
        _print(_describe(error))
        return 1
    for arguments in request["calls"]:
        try:
            value = _plain(namespace[request["entry"]](*arguments))
            _report(value)
        except BaseException as error:
            _report(error=_describe(error))
    return 0


def _print(text):
    with contextlib.suppress(BaseException):  # the program may have closed or replaced it
        print(text, file=sys.stderr)


def _child(request, pipes, filter_, module, parent):
    os.setsid()
    for target, (_, writer) in pipes.items():
        os.dup2(writer, target)
    os.closerange(4, 256)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    cpu = request["cpu_s"]
    for limit, value in (
        (resource.RLIMIT_CPU, int(cpu) + 2),
        (resource.RLIMIT_AS, int(request["memory_mb"] * 2**20)),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    random.seed(0)
    # The filter leaves no way to catch, block or reset this timer.
    signal.setitimer(signal.ITIMER_PROF, cpu)
    if filter_ is not None and not _confine(filter_):
        return 1
    status = _run(request, {"__name__": "__main__"} if module is None else vars(module))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # as in `_print`
            stream.flush()
    return status & 0xFF


def _judge(request, filter_, module):
    """Forks a child for one request and returns the reply about it."""
    pipes = {descriptor: os.pipe() for descriptor in (_STDOUT, _STDERR, _VALUES)}
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        status = 1
        try:
            status = _child(request, pipes, filter_, module, parent)
        finally:
            os._exit(status)
    for _, writer in pipes.values():
        os.close(writer)
    taken, ended = _collect({reader: name for name, (reader, _) in pipes.items()}, request)
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)  # it has not become a session yet
    _, status = os.waitpid(pid, 0)
    _end_orphans()
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGPROF, -signal.SIGXCPU):
        ended = ended or "time"
    text = {name: bytes(data).decode("utf-8", "replace") for name, data in taken.items()}
    return {
        "exit": code,
        "ended": ended,
        "stdout": text[_STDOUT],
        "stderr": text[_STDERR],
        "values": text[_VALUES],
    }


def _collect(readers, request):
    """What the child writes until it has closed all pipes, wrote too much or ran out of time, and which it was."""
    taken = {name: bytearray() for name in readers.values()}
    deadline = time.monotonic() + request["wall_s"]
    poll, still_open, ended = select.poll(), set(readers), ""
    for reader in readers:
        poll.register(reader, select.POLLIN)
    while still_open and not ended:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if time.monotonic() >= deadline:
            ended = "time"
        for reader, _ in ready:
            data = os.read(reader, _CHUNK)
            if not data:
                poll.unregister(reader)
                still_open.remove(reader)
            kept = taken[readers[reader]]
            kept += data
            if len(kept) > request["output_bytes"]:
                del kept[request["output_bytes"] :]
                ended = "output"
    for reader in readers:
        os.close(reader)
    return taken, ended


def _end_orphans():
    """Ends descendants of a child that outlived it; they are ours since this process is their reaper."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.001)


def main():
    module = None
    if len(sys.argv) > 1:
        sys.path.insert(0, sys.argv[2])
        module = importlib.import_module(sys.argv[1])
    for name in _LOADED:
        importlib.import_module(name)
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:
        os.close(null)
    _prctl(_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # children leave these objects' pages alone
    filter_ = _filter(reading=module is not None)
    probe = os.fork()
    if probe == 0:
        os._exit(not _confine(filter_))
    if os.waitpid(probe, 0)[1] != 0:
        filter_ = None
    os.write(replies, json.dumps({"confined": filter_ is not None}).encode() + b"\n")
    for line in requests:
        reply = json.dumps(_judge(json.loads(line), filter_, module)).encode() + b"\n"
        while reply:
            reply = reply[os.write(replies, reply) :]


if __name__ == "__main__":
    main()
