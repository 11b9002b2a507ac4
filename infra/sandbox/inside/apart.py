"""Starts the process of a test run in its own namespaces, from the server of a box.

Process ids, files in memory, /proc, network and IPC queues begin anew with each run and end with it, so that no run
finds traces of another. The server keeps the capabilities that this needs, and runs no code of a repository. The run
has none, and has the box's system call filter. Standard library only: this file runs inside the box.
"""

import contextlib
import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct
import traceback

_PR_SET_DUMPABLE = 4

ENDED, KILLED, SETUP_FAILED = 0, 2, 3  # exit codes of the first process of a run's namespaces
HOST_PROC = "/kernel"  # the host's /proc in the server's box; without it the kernel mounts no other
_FOLDERS = ("/tmp", "/run", "/dev/shm")
_NEW_SPACES = 0x20000 | 0x20000000 | 0x40000000 | 0x08000000  # mounts, processes, network, IPC
_CLONE = {"x86_64": 56, "aarch64": 220}
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_PROGRAMS = 1, 2, 4, 8
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_CAPABILITIES_VERSION = 0x20080522
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41
# PyDLL keeps the GIL during each call, so that a process cloned by one of them holds it.
_LIBC = ctypes.PyDLL(None, use_errno=True)


def fork_apart(allowed: bytes, writable_bytes: int, written_folder: str) -> int:
    """0 in a new process in its own namespaces; in this process, the id of the process that waits for the new one.
    When the new process ends, all that it started ends too. `allowed`: the system call filter. `written_folder`: a
    read-only folder into which the new process may write, where the kernel allows it; the writes end with it.
    """
    # Python itself cannot clone into namespaces. Only the fork below depends on Python's fork handlers.
    process_id = _check(
        _LIBC.syscall(_CLONE[platform.machine()], _NEW_SPACES | signal.SIGCHLD, 0, 0, 0, 0)
    )
    if process_id:
        return process_id
    try:
        _mount_folders(writable_bytes, written_folder)
        _drop_privileges(allowed)
        child = os.fork()
    except OSError:
        traceback.print_exc()  # the host reads it
        os._exit(SETUP_FAILED)
    if child:
        os._exit(_wait_for(child))
    os.setsid()
    return 0


def _wait_for(child: int) -> int:
    """Exit code for the end of the run. When this first process of the namespace exits, the kernel ends all others."""
    limits = (-signal.SIGXCPU, -signal.SIGKILL)
    while True:
        ended, status = os.wait()
        if ended == child:
            return KILLED if os.waitstatus_to_exitcode(status) in limits else ENDED


def _mount_folders(writable_bytes: int, written_folder: str) -> None:
    for folder in _FOLDERS:
        _mount("tmpfs", folder, _NO_SUID | _NO_DEVICES, f"mode=755,size={writable_bytes}")
    _mount("proc", "/proc", _READ_ONLY | _NO_SUID | _NO_DEVICES | _NO_PROGRAMS)
    if written_folder:
        with contextlib.suppress(OSError):  # an old kernel: writes fail
            _make_writable(written_folder, writable_bytes)
    _mount("tmpfs", HOST_PROC, _READ_ONLY, "size=4k")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
        fcntl.ioctl(loopback, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))


def _make_writable(folder: str, writable_bytes: int) -> None:
    """Covers a folder with an overlay of itself. The writes are in memory, below a mount that the next one covers."""
    _mount("tmpfs", HOST_PROC, _NO_SUID | _NO_DEVICES, f"mode=755,size={writable_bytes}")
    up, work = f"{HOST_PROC}/up", f"{HOST_PROC}/work"
    os.mkdir(up)
    os.mkdir(work)
    options = f"lowerdir={folder},upperdir={up},workdir={work},userxattr"
    _mount("overlay", folder, _NO_SUID | _NO_DEVICES, options)
    os.chdir(folder)  # the working directory was below the overlay


def _mount(kind: str, folder: str, flags: int, options: str = "") -> None:
    words = [word.encode() for word in (kind, folder, kind)]
    _check(_LIBC.mount(*words, flags, options.encode()))


def _drop_privileges(allowed: bytes) -> None:
    """Cannot be undone by this process or its children, because bubblewrap set no_new_privs."""
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
    """Keeps other processes of the box from reading this one's memory or descriptors, and from interrupting it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # From inside its box, process 1 receives only signals that it handles, so the default action is safe.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
