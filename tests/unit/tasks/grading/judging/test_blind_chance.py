"""What chance and addresses decide is held against no right fix."""

import asyncio
from pathlib import Path

import pytest

from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from tests.fakes.one_line_problem import make_one_line_problem
from tests.fakes.trials import find_difference

LINE = "    return [random.choice(words) for _ in range(count)]"
SOURCE = f"import random\n\n\ndef draw(words, count=1):\n{LINE}\n"
# of two values, chance agrees with itself often enough to pass for a behaviour
CHANCE = """from pkg.code import draw


def test_draw():
    for _ in range(30):
        assert draw(["one", "two"])[0] in ("one", "two")
    assert len(draw("abc", 4)) == 4
"""
# the hash of None is an address, so the set has another order in each process
ADDRESSES = """import pytest

from pkg.code import draw


@pytest.mark.parametrize("number, nothing", {(number, None) for number in range(12)})
def test_draw(number, nothing):
    assert len(draw([nothing], number + 1)) == number + 1
    assert number < 12
"""


@pytest.mark.parametrize("tests", [CHANCE, ADDRESSES], ids=["chance", "addresses"])
@pytest.mark.nightly
def test_right_fix_is_not_refused_for_luck(
    runner: asyncio.Runner, tmp_path: Path, tests: str
) -> None:
    edit = (LINE, LINE.replace("range(count)", "range(count + 1)"))
    repository, problem = make_one_line_problem(
        tmp_path, SOURCE, tests, edit, symbol="draw", failing="test_draw"
    )
    for number in range(3):
        files = {"pkg/code.py": repository.files["pkg/code.py"] + b"# %d\n" % number}
        assert not runner.run(find_difference(BlindTrials(), problem, files, repository))
