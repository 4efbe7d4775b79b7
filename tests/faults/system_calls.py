"""Runs a function in a child process and stops it with SIGKILL at its n-th system call that changes a file system.

Linux on x86-64, by ptrace. The child is killed at the entry of the call: it never happens.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable

__all__ = ["can_trace", "run_until"]

TRACE_ME, GET_REGISTERS, NEXT_CALL, SET_OPTIONS = 0, 12, 24, 0x4200
SYSTEM_CALL_STOPS = 1
TRAP = signal.SIGTRAP | 0x80
RAX, RSI, RDX = 15, 13, 12
"""Places in `struct user_regs_struct`, whose fields are 64 bits wide."""

ALWAYS = {
    1, 18, 20, 296,  # write, pwrite64, writev, pwritev
    40, 326, 285, 76, 77,  # sendfile, copy_file_range, fallocate, truncate, ftruncate
    74, 75,  # fsync, fdatasync
    82, 264, 316, 86, 265, 87, 263,  # rename, renameat, renameat2, link, linkat, unlink, unlinkat
    83, 258, 84, 88, 266,  # mkdir, mkdirat, rmdir, symlink, symlinkat
    90, 91, 268, 92, 93, 94, 260,  # chmod, fchmod, fchmodat, chown, fchown, lchown, fchownat
    188, 189, 190, 280, 85,  # setxattr, lsetxattr, fsetxattr, utimensat, creat
}  # fmt: skip
OPEN, OPENAT = 2, 257
TRUNCATES = os.O_CREAT | os.O_TRUNC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def can_trace() -> bool:
    """Whether this machine lets a process trace its child."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    try:
        return run_until(lambda: None, None) >= 0
    except OSError:
        return False


def run_until(do: Callable[[], None], stop: int | None) -> int:
    """Run `do` in a child, and kill it at write-type call number `stop` (from 1); returns how many there were.

    The result is -1 if the child ended by itself before that call, with an error.
    """
    child = os.fork()
    if not child:
        _child(do)
    os.waitpid(child, 0)
    _trace(SET_OPTIONS, child, SYSTEM_CALL_STOPS)
    count, entering, deliver = 0, True, 0
    registers = (ctypes.c_ulonglong * 27)()
    while True:
        _trace(NEXT_CALL, child, deliver)
        _, status = os.waitpid(child, 0)
        deliver = 0
        if os.WIFEXITED(status):
            return count if os.WEXITSTATUS(status) == 0 else -1
        if os.WIFSIGNALED(status):
            return -1
        if os.WSTOPSIG(status) != TRAP:
            deliver = os.WSTOPSIG(status)
            continue
        if entering:
            _trace(GET_REGISTERS, child, ctypes.addressof(registers))
            if _writes(registers):
                count += 1
                if count == stop:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    return count
        entering = not entering


def _child(do: Callable[[], None]) -> None:
    code = 1
    try:
        _trace(TRACE_ME, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        do()
        code = 0
    finally:
        os._exit(code)


def _writes(registers: ctypes.Array[ctypes.c_ulonglong]) -> bool:
    number = registers[RAX]
    if number in ALWAYS:
        return True
    flags = registers[RSI] if number == OPEN else registers[RDX] if number == OPENAT else 0
    return bool(flags & TRUNCATES)


def _trace(request: int, process: int, data: int) -> None:
    if _libc.ptrace(request, process, None, data) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
