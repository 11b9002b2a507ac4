"""The seccomp filter of a box: the system calls that the kernel refuses to every process inside.

The program is classic BPF over `struct seccomp_data`, see seccomp(2). It refuses calls that reach state shared with other
boxes or the host (keyrings, the clock, the kernel's log), create objects that outlive the processes of a run (System V
memory), inspect or limit other processes, or show or set which parts of files are in memory, and large, recent parts
of the kernel that no test needs. Bubblewrap loads it, or the server of test runs for each run (inside/apart.py). Nothing
inside can remove it afterwards.
"""

import errno
import fcntl
import functools
import itertools
import os
import platform
import socket
import struct

_LOAD, _EQUALS, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # bytes in seccomp_data, little endian
_FIRST_AT, _SECOND_AT, _THIRD_AT = 16, 24, 32  # arguments
_FOREIGN_CALLS = 0x40000000  # on x86-64, calls of the x32 ABI have numbers from here on
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_PROCESS_OF_IOPRIO = 1  # IOPRIO_WHO_PROCESS of the kernel

# name -> number on x86-64 and on aarch64; newer calls have one number for all architectures
REFUSED = {
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_secret": (447, 447),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # these show or set which pages of a file are in memory, which a later box could see
    "mincore": (27, 232),
    "cachestat": (451, 451),
    "readahead": (187, 213),
    "sync_file_range": (277, 84),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "mbind": (237, 235),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "set_mempolicy": (238, 237),
    "vmsplice": (278, 75),
}
# answered with success and not executed, since programs only give advice with them
_ADVICE = {"fadvise64": (221, 223)}
# advice that acts on the pages of mapped files: MADV_WILLNEED, COLD, PAGEOUT, POPULATE_READ and POPULATE_WRITE
_FILE_ADVICE = (3, 20, 21, 22, 23)
# allowed for the calling process (id 0) only, because the box's server runs as the same user
_OWN_PROCESS = {
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
_SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}
_BY_ARGUMENTS = {
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "fcntl": (72, 25),
    "madvise": (28, 233),
}
# column of the numbers above, audit architecture
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


@functools.cache
def filter_program(machine: str = platform.machine()) -> bytes:
    """The filter for one kind of processor, as bubblewrap's `--seccomp` reads it. KeyError: unknown processor."""
    column, architecture = MACHINES[machine]
    dispatch = {numbers[column]: "refuse" for numbers in REFUSED.values()}
    dispatch |= {numbers[column]: "own" for numbers in _OWN_PROCESS.values()}
    dispatch |= {numbers[column]: "socket" for numbers in _SOCKETS.values()}
    dispatch |= {numbers[column]: name for name, numbers in _BY_ARGUMENTS.items()}
    dispatch |= {numbers[column]: "nothing" for numbers in _ADVICE.values()}
    blocks = {
        "": [
            _step(_LOAD, _ARCHITECTURE_AT),
            _step(_EQUALS, architecture, otherwise="refuse"),
            _step(_LOAD, _NUMBER_AT),
            _step(_AT_LEAST, _FOREIGN_CALLS, "refuse"),
            *(_step(_EQUALS, number, block) for number, block in sorted(dispatch.items())),
            _step(_RETURN, _ALLOW),
        ],
        "socket": [
            _step(_LOAD, _FIRST_AT),
            *(_step(_EQUALS, family, "allow") for family in _FAMILIES),
            _step(_RETURN, _ERROR | errno.EAFNOSUPPORT),
        ],
        "own": [_step(_LOAD, _FIRST_AT), _step(_EQUALS, 0, "allow", "refuse")],
        "setpriority": _one_process(os.PRIO_PROCESS),
        "ioprio_set": _one_process(_PROCESS_OF_IOPRIO),
        "fcntl": [  # leases and notifications on a shared file would be seen by other boxes
            _step(_LOAD, _SECOND_AT),
            _step(_EQUALS, fcntl.F_SETLEASE, "refuse"),
            _step(_EQUALS, fcntl.F_NOTIFY, "refuse", "allow"),
        ],
        "madvise": [
            _step(_LOAD, _THIRD_AT),
            *(_step(_EQUALS, advice, "nothing") for advice in _FILE_ADVICE),
            _step(_RETURN, _ALLOW),
        ],
        "nothing": [_step(_RETURN, _ERROR)],
        "refuse": [_step(_RETURN, _ERROR | errno.EPERM)],
        "allow": [_step(_RETURN, _ALLOW)],
    }
    steps = [step for block in blocks.values() for step in block]
    sizes = itertools.accumulate(map(len, blocks.values()), initial=0)
    places = dict(zip(blocks, sizes, strict=False))
    packed = b""
    for place, (code, value, target, otherwise) in enumerate(steps):
        jumps = [places[name] - place - 1 if name else 0 for name in (target, otherwise)]
        packed += struct.pack("<HBBI", code, *jumps, value)
    return packed


def _one_process(kind: int) -> list[tuple[int, int, str, str]]:
    """A block that allows a call only with the arguments `kind` and 0, the calling process."""
    return [
        _step(_LOAD, _FIRST_AT),
        _step(_EQUALS, kind, otherwise="refuse"),
        _step(_LOAD, _SECOND_AT),
        _step(_EQUALS, 0, "allow", "refuse"),
    ]


def _step(
    code: int, value: int, target: str = "", otherwise: str = ""
) -> tuple[int, int, str, str]:
    """One instruction, with the blocks to jump to if a comparison holds or fails. Empty: continue with the next one."""
    return code, value, target, otherwise
