"""What chance and addresses decide is held against no right fix."""

import asyncio
from pathlib import Path

import pytest

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.records import LineEdit, Problem, Split

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
def test_right_fix_is_not_refused_for_luck(
    runner: asyncio.Runner, tmp_path: Path, tests: str
) -> None:
    for path, text in (
        ("pkg/__init__.py", ""),
        ("pkg/code.py", SOURCE),
        ("tests/test_code.py", tests),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    repository = PreparedRepository.from_directory("pkg", tmp_path, ("pkg",), ("tests",))
    broken = LINE.replace("range(count)", "range(count + 1)")
    problem = Problem(
        problem_id="draw",
        repository="pkg",
        repository_fingerprint=repository.fingerprint,
        kind="mutation",
        operator="integer",
        path="pkg/code.py",
        symbol="draw",
        first_line=4,
        last_line=5,
        prompt="Fix draw",
        edits=(LineEdit(path="pkg/code.py", line_number=5, gold_text=LINE, broken_text=broken),),
        fail_to_pass=("tests/test_code.py::test_draw",),
        pass_to_pass=(),
        split=Split.TRAIN,
    )
    for number in range(3):
        files = {"pkg/code.py": repository.files["pkg/code.py"] + b"# %d\n" % number}
        assert not runner.run(BlindTrials().find_difference(problem, files, repository))
