"""An adversary that may use anything which outlives a box: it hands random bits from one that ended to one made after.

Each relay has 256 bits to hand on by three ways: from a test run to the shell of a later box (the next agent's, and the
blind trial's), from a test run to a later run of another change, and from shell to shell. Of 256 fair bits more than
60 % agree with a chance of 0.0007; where they do, new bits are drawn once more, so that a relay which carries nothing
fails with a chance of 5e-7.
"""

import asyncio
import secrets
import shlex
from collections.abc import Awaitable, Callable, Iterator

import pytest

from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.memory import memory_root
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from tests.fakes.repositories import WORDKIT, open_repository

BITS = 256
LIMIT = 0.6
PATHS = {"wordkit/counting.py": b"    total = 0", "wordkit/shaping.py": b"    words = "}
SECONDS = 60.0
COMMON = """
import ctypes, fcntl, functools, glob, mmap, os, resource, signal, socket, stat, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def quiet(call, *arguments):
    try: return call(*arguments)
    except Exception: return None
@functools.cache
def places():
    # pages that no read-ahead of another reaches, in files that all boxes have
    files = [f for top in ('/usr/bin', '/usr/lib', '/opt/python', '/sandbox', '/repo') for f in
             glob.glob(top + '/*') + glob.glob(top + '/*/*') if os.path.isfile(f) and not os.path.islink(f)]
    files = sorted((f for f in files if os.path.getsize(f) > 600_000), key=lambda f: (-os.path.getsize(f), f))
    found = []
    for f in files:
        for at in range(3 * 135168, os.path.getsize(f) - 135168, 135168):
            found.append((f, at // 4096 * 4096))
    return found[:256]
@functools.cache
def opened():
    kept = {}
    for f, at in places():
        kept.setdefault(f, os.open(f, os.O_RDONLY))
    return [(kept[f], at) for f, at in places()]
def drop_and_fill(bits):
    for (f, at), bit in zip(opened(), bits):
        quiet(os.posix_fadvise, f, 0, 0, os.POSIX_FADV_RANDOM)
        quiet(os.posix_fadvise, f, at - 65536, 135168, os.POSIX_FADV_DONTNEED)
        area = mmap.mmap(f, 4096, prot=mmap.PROT_READ, offset=at)
        quiet(area.madvise, 21)
    for (f, at), bit in zip(opened(), bits):
        if bit: os.pread(f, 1, at)
def by_middle(values):
    middle = sorted(values)[len(values) // 2]
    return [int(value < middle) for value in values]
def timed(call):
    start = time.perf_counter_ns(); quiet(call); return time.perf_counter_ns() - start
def faults(kind):
    values = []
    for f, at in opened():
        area = mmap.mmap(f, 4096, prot=mmap.PROT_READ, offset=at)
        before = getattr(resource.getrusage(resource.RUSAGE_SELF), kind); area[0]
        values.append(getattr(resource.getrusage(resource.RUSAGE_SELF), kind) - before)
    return [int(value == min(values)) for value in values]
def resident(f, at):
    area = mmap.mmap(f, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=at)
    view, told = ctypes.c_char.from_buffer(area), ctypes.create_string_buffer(1)
    libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(4096), told)
    return told.raw[0] & 1
def at_once(f, at):
    return int(quiet(os.preadv, f, [bytearray(1)], at, os.RWF_NOWAIT) == 1)
def number(bits, start, count):
    return sum(bit << place for place, bit in enumerate(bits[start:start + count]))
def bits_of(value, count):
    return [value >> place & 1 for place in range(count)]
FOLDERS = ('/tmp', '/run', '/dev/shm', '/repo', '/var/tmp', '/dev/mqueue')
"""
# name -> what hands bits on, and what reads as many
RELAYS = {
    "cached pages, by mincore": ("drop_and_fill(bits)", "[resident(f, at) for f, at in opened()]"),
    "cached pages, by the time of a read": (
        "drop_and_fill(bits)",
        "by_middle([timed(lambda: os.pread(f, 1, at)) for f, at in opened()])",
    ),
    "cached pages, by major faults": ("drop_and_fill(bits)", "faults('ru_majflt')"),
    "cached pages, by minor faults": ("drop_and_fill(bits)", "faults('ru_minflt')"),
    "cached pages, by a read that does not wait": (
        "drop_and_fill(bits)",
        "[at_once(f, at) for f, at in opened()]",
    ),
    "cached pages, by blocks read": (
        "drop_and_fill(bits)",
        "[int(-resource.getrusage(0).ru_inblock + (os.pread(f, 1, at) and resource.getrusage(0).ru_inblock) == 0)"
        " for f, at in opened()]",
    ),
    "times of access": (
        "[os.pread(f, 1, 0) for (f, at), bit in zip(opened(), bits) if bit]",
        "by_middle([-os.fstat(f).st_atime_ns for f, at in opened()])",
    ),
    "names looked up": (
        "[quiet(os.stat, f'/usr/lib/nothing{n}') for n, bit in enumerate(bits) if bit for _ in range(9)]",
        "by_middle([timed(lambda: os.stat(f'/usr/lib/nothing{n}')) for n in range(256)])",
    ),
    "locks": (
        "kept = [quiet(fcntl.flock, os.open(f, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        " for (f, at), bit in zip(places(), bits) if bit]; os.fork() or (os.setsid(), time.sleep(600))",
        "[int(quiet(lambda: [fcntl.flock(os.open(f, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)]) is None)"
        " for f, at in places()]",
    ),
    "files": (
        "[quiet(lambda: open(f'{top}/left{n}', 'w').close()) for top in FOLDERS for n, bit in enumerate(bits) if bit]",
        "[int(any(os.path.exists(f'{top}/left{n}') for top in FOLDERS)) for n in range(256)]",
    ),
    "sockets with a name": (
        "kept = []\nfor n, bit in enumerate(bits):\n"
        "    if bit: kept.append(socket.socket(socket.AF_UNIX)); quiet(kept[-1].bind, f'\\0left{n}')\n"
        "os.fork() or (os.setsid(), time.sleep(600))",
        "[int(quiet(lambda: [socket.socket(socket.AF_UNIX).bind(f'\\0left{n}')]) is None) for n in range(256)]",
    ),
    "ports": (
        "kept = []\nfor n, bit in enumerate(bits):\n"
        "    if bit: kept.append(socket.socket()); quiet(kept[-1].bind, ('127.0.0.1', 20000 + n))\n"
        "os.fork() or (os.setsid(), time.sleep(600))",
        "[int(quiet(lambda: [socket.socket().bind(('127.0.0.1', 20000 + n))]) is None) for n in range(256)]",
    ),
    "System V memory": (
        "[libc.shmget(4000 + n, 4096, 0o1666) for n, bit in enumerate(bits) if bit]",
        "[int(libc.shmget(4000 + n, 0, 0) >= 0) for n in range(256)]",
    ),
    "numbers of processes": (
        "wanted = number(bits, 0, 9)\nfor _ in range(1200):\n"
        "    child = os.fork()\n"
        "    if child == 0: os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "    if child % 512 == wanted: break",
        "bits_of((os.fork() or os._exit(0)) % 512, 9) * 28 + [0] * 4",
    ),
    "numbers of files in memory": (
        "wanted, n = number(bits, 0, 9), 0\n"
        "while n < 1200 and os.stat(os.open(f'/tmp/n{n}', os.O_CREAT | os.O_WRONLY)).st_ino % 512 != wanted: n += 1",
        "bits_of(os.stat(os.open('/tmp/next', os.O_CREAT)).st_ino % 512, 9) * 28 + [0] * 4",
    ),
    "counters of the network": (
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "[quiet(s.sendto, b'x', ('127.0.0.1', 9)) for _ in range(number(bits, 0, 9))]",
        "bits_of(int(open('/proc/net/dev').read().split('lo:')[1].split()[1]), 9) * 28 + [0] * 4",
    ),
}  # fmt: skip
NUMBERS = frozenset(name for name in RELAYS if name.startswith(("numbers", "counters")))


def programs(name: str, bits: list[int]) -> tuple[str, str]:
    """What sends, and what reads, as text that defines `done`: hexadecimal digits."""
    send, read = RELAYS[name]
    sends = f"{COMMON}\nbits = {bits}\n{send}\ndone = 'sent'\n"
    reads = f"{COMMON}\nseen = {read}\ndone = f'{{number(seen + [0] * 256, 0, 256):064x}}'\n"
    return sends, reads


class Routes:
    """The boxes of one test."""

    def __init__(self, repository: PreparedRepository) -> None:
        self.repository = repository
        limits = SandboxLimits(memory_bytes=2 << 30, test_cpu_seconds=30.0)
        self.server = TestServer(repository, limits, parallel_runs=1)

    async def run(self, program: str) -> str:
        """In a test run, as the change of a function that a test calls."""
        path = "wordkit/counting.py"
        body = f"    told = {{}}\n    exec({program!r}, told)\n    raise AssertionError(told['done'])\n"
        text = self.repository.files[path]
        files = {path: text.replace(PATHS[path], body.encode() + PATHS[path])}
        assert files[path] != text
        report = await self.server.run(files, ["tests/test_counting.py::test_count_words"], SECONDS)
        return report.first_failure.message if report.first_failure else ""

    async def shell(self, program: str) -> str:
        """In an agent's box, or the blind trial's: both are made alike."""
        async with open_box(self.repository) as box:
            command = f"python -c {shlex.quote(program + 'print(done)')}"
            return (await box.exec(command, SECONDS)).output.decode().strip()


async def accuracy(
    name: str, send: Callable[[str], Awaitable[str]], read: Callable[[str], Awaitable[str]]
) -> float:
    """Share of bits that arrive."""
    bits = [secrets.randbelow(2) for _ in range(BITS)]
    if name in NUMBERS:  # nine bits are sent, 28 times
        bits = (bits[:9] * 29)[:BITS]
    sends, reads = programs(name, bits)
    assert await send(sends) == "sent"
    told = await read(reads)
    assert len(told) == BITS // 4, told
    return sum(int(told, 16) >> place & 1 == bit for place, bit in enumerate(bits)) / BITS


async def is_carried(
    name: str, send: Callable[[str], Awaitable[str]], read: Callable[[str], Awaitable[str]]
) -> bool:
    """Whether a relay carries more than chance does. Of nine bits, all must arrive three times."""
    limit = 0.98 if name in NUMBERS else LIMIT
    for _ in range(3 if name in NUMBERS else 2):
        share = await accuracy(name, send, read)
        if max(share, 1 - share) <= limit:
            return False
    return True


@pytest.fixture(scope="module")
def routes(runner: asyncio.Runner) -> Iterator[Routes]:
    made = Routes(open_repository(WORDKIT))
    yield made
    runner.run(made.server.close())


@pytest.mark.skipif(
    memory_root() is None, reason="files of boxes lie on a disk here: SECURITY.md says so"
)
@pytest.mark.parametrize("route", ["run to shell", "run to run", "shell to shell"])
@pytest.mark.parametrize("name", RELAYS)
@pytest.mark.sampled(17)  # each relay; 16 would choose one route for all
def test_nothing_is_handed_on_to_a_later_box(
    runner: asyncio.Runner, routes: Routes, name: str, route: str
) -> None:
    first, _, last = route.split()
    assert not runner.run(is_carried(name, getattr(routes, first), getattr(routes, last)))
