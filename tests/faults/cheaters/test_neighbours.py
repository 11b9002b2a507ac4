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
WAIT = b"    import time\n    time.sleep(0.15)\n"


def run_together(attack: bytes, others: list[bytes]) -> list[TestReport | BaseException]:
    """Reports on one edit and, while it runs, on others."""
    repository = open_repository(WORDKIT)
    text = repository.files[PATH]
    assert text.count(LINE) == 1

    async def run_all() -> list[TestReport | BaseException]:
        server = TestServer(repository)
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
def test_an_attack_ends_no_other_run(attack: bytes) -> None:
    attacked, *others = run_together(attack, [WAIT + b"    # %d\n" % n for n in range(4)])
    assert isinstance(attacked, SandboxLost) or not attacked.passed
    assert [other.passed for other in others] == [True] * 4


def test_runs_do_not_see_each_others_files() -> None:
    left, *others = run_together(LEAVE, [LOOK + b"    # %d\n" % n for n in range(2)])
    assert left.passed
    assert [other.passed for other in others] == [True] * 2
