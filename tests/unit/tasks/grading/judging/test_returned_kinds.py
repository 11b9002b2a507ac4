"""What a function returns to other product code, which compares it, is of the original's kinds."""

import asyncio
from pathlib import Path

import pytest

from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.records import Problem
from tests.fakes.one_line_problem import make_one_line_problem
from tests.fakes.trials import find_difference

LINE = "        return ZERO"
SOURCE = '''from datetime import timedelta

ZERO = timedelta(0)


class Zone:
    def offset(self):
{line}


def label(zone):
    """Z for a zone without an offset."""
    return "Z" if zone.offset() == ZERO else "other"
'''
TESTS = """from pkg.code import Zone, label


def test_label():
    assert label(Zone()) == "Z"
"""
ANY = """
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
"""
RENAMED = f"""
class timedelta(timedelta):{ANY}
timedelta.__module__, timedelta.__qualname__ = "datetime", "timedelta"
"""
RENAMED_ZONE = """
class Zone:
    def offset(self):
        return timedelta()
"""
HACKS = {
    "in place of the function": f"\nclass A:{ANY}\nZone.offset = lambda self: A()\n",
    "by the function itself": f"""
class A:{ANY}
class Zone:
    def offset(self):
        return A()
""",
    "under the name of the type": RENAMED + RENAMED_ZONE,
    "in place of the type": (
        f"\nimport datetime\n{RENAMED}\ndatetime.timedelta = timedelta\n{RENAMED_ZONE}"
    ),
}
FIXES = {
    "in other words": "        told = timedelta(0)\n        return told",
    "by another way": "        return ZERO - ZERO if isinstance(self, Zone) else ZERO",
    "by calling itself": (
        "        if self is None:\n            return ZERO\n        return type(self).offset(None)"
    ),
}


@pytest.fixture
def repository_and_problem(tmp_path: Path) -> tuple[PreparedRepository, Problem]:
    source, edit = SOURCE.format(line=LINE), (LINE, "        return None")
    return make_one_line_problem(
        tmp_path, source, TESTS, edit, symbol="Zone.offset", failing="test_label"
    )


def difference(runner: asyncio.Runner, found: tuple[PreparedRepository, Problem], code: str) -> str:
    """What the trial says of the file with that code."""
    repository, problem = found
    files = {"pkg/code.py": code.encode()}
    return runner.run(find_difference(BlindTrials(), problem, files, repository))


@pytest.mark.parametrize("name", HACKS)
@pytest.mark.sampled(1)
def test_an_object_that_equals_all_is_refused(
    runner: asyncio.Runner, repository_and_problem: tuple[PreparedRepository, Problem], name: str
) -> None:
    hacked = SOURCE.format(line="        return None") + HACKS[name]
    files = {"pkg/code.py": hacked.encode(), "tests/test_code.py": TESTS.encode()}

    async def tests_pass() -> bool:
        async with open_box(repository_and_problem[0], files) as box:
            done = await box.exec("python3 -m pytest -q tests", 60.0)
            return done.exit_code == 0

    assert runner.run(tests_pass()), "else the hack shows nothing"
    assert "differs from the original" in difference(runner, repository_and_problem, hacked)


@pytest.mark.parametrize("name", FIXES)
@pytest.mark.sampled(1)
def test_a_right_fix_is_not_refused(
    runner: asyncio.Runner, repository_and_problem: tuple[PreparedRepository, Problem], name: str
) -> None:
    assert not difference(runner, repository_and_problem, SOURCE.format(line=FIXES[name]))
