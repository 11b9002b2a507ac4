"""Runs of tests that reach for other runs of the same repository: those end as if they were alone."""

import asyncio

import pytest

from ostinato.infra.platform.errors import SandboxLost
from ostinato.infra.sandbox.protocol import TestReport
from ostinato.infra.sandbox.test_server import TestServer
from tests.fakes.repositories import WORDKIT, open_repository

PATH = "wordkit/counting.py"
LINE = b"    total = 0"
KILL = b"""    import subprocess, time
    time.sleep(0.3)
    subprocess.run(['sh', '-c', 'kill -9 -1'])
"""
DAEMON = b"""    import subprocess
    loop = 'while :; do for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p != 1 ] && [ $p != $$ ] && kill -9 $p; done; done'
    subprocess.Popen(['setsid', 'sh', '-c', loop], start_new_session=True, stdout=subprocess.DEVNULL)
"""
# finds the runner's way to its server on the stack, says something no runner says, and ends
SPEAK = b"""    import os, sys
    frame = sys._getframe()
    while frame and not {'send', 'shared'} <= frame.f_locals.keys():
        frame = frame.f_back
    frame.f_locals['send'](%s)
    os.kill(os.getpid(), 9)
"""
LEAVE = b"""    import time
    open('/tmp/left', 'w').write('of another')
    time.sleep(0.5)
"""
LOOK = b"""    import os, time
    time.sleep(0.2)
    assert not os.path.exists('/tmp/left')
"""
# what one run does, and what the next one must not find
TRACES = {
    "a closed folder": (
        "os.mkdir('/tmp/kept'); open('/tmp/kept/text', 'w').write('x'); os.chmod('/tmp/kept', 0)",
        "os.path.exists('/tmp/kept')",
    ),
    "folders too deep to remove": (
        "os.chdir('/dev/shm'); [(os.mkdir('d'), os.chdir('d')) for _ in range(3000)]",
        "os.listdir('/dev/shm')",
    ),
    "a file in a folder that cannot be written": (
        "open('/run/kept', 'w').write('x'); os.chmod('/run', 0o500)",
        "os.listdir('/run')",
    ),
    "the mode of a folder": ("os.chmod('/tmp', 0o711)", "os.stat('/tmp').st_mode & 0o777 == 0o711"),
    "the times of a folder": ("os.utime('/tmp', (7, 7))", "os.stat('/tmp').st_mtime == 7"),
    "a port": (
        "server = socket.create_server(('127.0.0.1', 4711)); client = socket.create_connection(('127.0.0.1', 4711));"
        " held = server.accept()[0]; held.close(); client.close()",
        "':1267 ' in open('/proc/net/tcp').read()",
    ),
    "shared memory": ("libc.shmget(4711, 4096, 0o1666)", "libc.shmget(4711, 0, 0) >= 0"),
    "a queue of messages": ("libc.mq_open(b'/kept', 66, 0o666, None)", "libc.mq_open(b'/kept', 0) >= 0"),
    "memory of the server": (
        "resource.prlimit(1, resource.RLIMIT_AS, (1 << 20, 1 << 20))",
        "resource.getrlimit(resource.RLIMIT_CORE) != (0, 0)",
    ),
    "time of the server": ("resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))", "False"),
    "files of the server": ("resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))", "False"),
    "the server's turn": ("os.setpriority(os.PRIO_PROCESS, 1, 17)", "os.getpriority(0, 0) == 17"),
    "everybody's turn": ("os.setpriority(os.PRIO_USER, 0, 17)", "os.getpriority(0, 0) == 17"),
    "the server's processors": (
        "os.sched_setaffinity(1, list(os.sched_getaffinity(0))[:1])",
        "False",
    ),
    "the server's end where memory runs out": (
        "open('/proc/1/oom_score_adj', 'w').write('999')",
        "open('/proc/1/oom_score_adj').read() == '999\\n'",
    ),
}  # fmt: skip
# the one waits for the other at its lock, or gives up
HOLD = b"""    import fcntl, time
    held = [open(place) for place in (%s)]
    [fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB) for one in held]
    time.sleep(0.6)
"""
FEEL = b"""    import fcntl, time
    time.sleep(0.3)
    felt = [open(place) for place in (%s)]
    [fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB) for one in felt]
"""
SHARED = b"'/repo/tests/__init__.py', '/repo/wordkit/counting.py', '/sandbox/agent', '/opt/python/bin/python3', '/dev/null'"
WAIT = b"    import time\n    time.sleep(0.15)\n"


def run_together(
    attack: bytes, others: list[bytes], *, at_a_time: int = 2
) -> list[TestReport | BaseException]:
    """Reports on one edit and, while it runs, on others. `at_a_time`: 1 for one box, in turn."""
    repository = open_repository(WORDKIT)
    text = repository.files[PATH]
    assert text.count(LINE) == 1

    async def run_all() -> list[TestReport | BaseException]:
        server = TestServer(repository, parallel_runs=at_a_time)
        try:
            await server.start()
            tests = [test for test in server.tests if "test_counting" in test]
            edits = [attack, *others]
            runs = [
                server.run({PATH: text.replace(LINE, edit + LINE)}, tests, 20.0) for edit in edits
            ]
            return await asyncio.gather(*runs, return_exceptions=True)
        finally:
            await server.close()

    return asyncio.run(run_all())


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(KILL, id="kills everything"),
        pytest.param(DAEMON, id="leaves a daemon that kills"),
        pytest.param(SPEAK % b"{'begin': ['x']}", id="begins what is no test"),
        pytest.param(SPEAK % b"{'done': True, 'violations': 5}", id="ends in a wrong form"),
        pytest.param(SPEAK % b"{'test': 'x'}", id="a result in a wrong form"),
    ],
)
@pytest.mark.sampled(2)
def test_an_attack_ends_no_other_run(attack: bytes) -> None:
    attacked, *others = run_together(attack, [WAIT + b"    # %d\n" % n for n in range(4)])
    assert isinstance(attacked, SandboxLost) or not attacked.passed
    assert [other.passed for other in others] == [True] * 4


def test_runs_do_not_see_each_others_files() -> None:
    left, *others = run_together(LEAVE, [LOOK + b"    # %d\n" % n for n in range(2)])
    assert left.passed
    assert [other.passed for other in others] == [True] * 2


def test_runs_do_not_feel_each_others_locks() -> None:
    held, felt = run_together(HOLD % SHARED, [FEEL % SHARED])
    assert isinstance(held, TestReport)
    assert isinstance(felt, TestReport)
    assert (held.passed, felt.passed) == (True, True), (held.first_failure, felt.first_failure)


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.sampled(5)
def test_a_run_leaves_nothing_for_the_next(name: str) -> None:
    leave, found = TRACES[name]
    tools = b"    import contextlib, ctypes, os, resource, socket\n    libc = ctypes.CDLL(None)\n"
    attack = f"    with contextlib.suppress(OSError):\n        {leave}\n"
    look = f"    assert not ({found})\n"
    _, *others = run_together(tools + attack.encode(), [tools + look.encode(), WAIT], at_a_time=1)
    assert [other.passed for other in others] == [True] * 2, others
