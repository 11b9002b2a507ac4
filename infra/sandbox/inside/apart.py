"""A process of one test run in namespaces of its own, made by the server of a box.

Process numbers, files in memory, /proc, network and queues begin anew with each run and end with it, so that no run
finds there what another one did. The server keeps the rights that this takes, and runs no code of a repository; the
run has none, and the box's filter of system calls. Standard library only: this file runs inside the box.
"""

import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct
import traceback

_PR_SET_DUMPABLE = 4

ENDED, KILLED, NOT_MADE = 0, 2, 3  # exit codes of the first process of a run's namespaces
HIDDEN = "/kernel"  # where the server's box has the host's /proc, without which the kernel makes no other
_FOLDERS = ("/tmp", "/run", "/dev/shm")
_NEW_SPACES = 0x20000 | 0x20000000 | 0x40000000 | 0x08000000  # mounts, processes, network, IPC
_CLONE = {"x86_64": 56, "aarch64": 220}
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_PROGRAMS = 1, 2, 4, 8
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_CAPABILITIES_VERSION = 0x20080522
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41
# keeps Python's lock through each call, so that a process made by one of them has it
_LIBC = ctypes.PyDLL(None, use_errno=True)


def fork_apart(allowed: bytes, writable_bytes: int) -> int:
    """0 in a process in namespaces of its own; in this one, the number of the process that waits for it. When the
    other has ended, all that it started ends too. `allowed`: the filter of system calls.
    """
    # no call of Python's own can ask for namespaces; nothing but the fork below depends on Python's state
    process_id = _check(
        _LIBC.syscall(_CLONE[platform.machine()], _NEW_SPACES | signal.SIGCHLD, 0, 0, 0, 0)
    )
    if process_id:
        return process_id
    try:
        _make_places(writable_bytes)
        _give_up_rights(allowed)
        child = os.fork()
    except OSError:
        traceback.print_exc()  # the host reads it
        os._exit(NOT_MADE)
    if child:
        os._exit(_wait_for(child))
    os.setsid()
    return 0


def _wait_for(child: int) -> int:
    """How the run ended. What it leaves behind is ended by the kernel with this process, the first of its namespace."""
    limits = (-signal.SIGXCPU, -signal.SIGKILL)
    while True:
        ended, status = os.wait()
        if ended == child:
            return KILLED if os.waitstatus_to_exitcode(status) in limits else ENDED


def _make_places(writable_bytes: int) -> None:
    for folder in _FOLDERS:
        _mount("tmpfs", folder, _NO_SUID | _NO_DEVICES, f"mode=755,size={writable_bytes}")
    _mount("proc", "/proc", _READ_ONLY | _NO_SUID | _NO_DEVICES | _NO_PROGRAMS)
    _mount("tmpfs", HIDDEN, _READ_ONLY, "size=4k")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
        fcntl.ioctl(loopback, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))


def _mount(kind: str, folder: str, flags: int, options: str = "") -> None:
    words = [word.encode() for word in (kind, folder, kind)]
    _check(_LIBC.mount(*words, flags, options.encode()))


def _give_up_rights(allowed: bytes) -> None:
    """Neither this process nor what it starts gets them back: bubblewrap forbade new privileges."""
    head = struct.pack("<Ii", _CAPABILITIES_VERSION, 0)
    _check(_LIBC.capset(head, bytes(24)))
    steps = ctypes.create_string_buffer(allowed, len(allowed))
    program = struct.pack("@HP", len(allowed) // 8, ctypes.addressof(steps))
    _check(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def protect_server() -> None:
    """No other process of the box may read this one's memory or descriptors, or interrupt it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Process 1 receives from inside its box only signals it handles, so the default action is the
    # safe one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def read_waited_seconds(process_id: int) -> float:
    """Time a process was ready to run while others had the CPUs. 0 where the kernel does not say."""
    try:
        with open(f"/proc/{process_id}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
