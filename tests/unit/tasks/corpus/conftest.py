"""A tiny prepared repository with proven problems, as the problem stage would leave it."""

from pathlib import Path

import pytest

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.records import LineEdit, Problem, Split

MODULE = """def add_all(values, start=0):
    total = start
    for value in values:
        total += value
    return total


def keep_even(values):
    kept = [value for value in values if value % 2 == 0]
    return kept


def largest_gap(values):
    ordered = sorted(values)
    gaps = [later - earlier for earlier, later in zip(ordered, ordered[1:])]
    return max(gaps, default=0)
"""
TESTS = """from tiny.core import add_all, keep_even, largest_gap


def test_add_all():
    assert add_all([1, 2], 3) == 6


def test_keep_even():
    assert keep_even([1, 2, 4]) == [2, 4]


def test_largest_gap():
    assert largest_gap([1, 9, 3]) == 6
"""
OTHER_MODULE = """def shout(words):
    loud = [word.upper() for word in words]
    return ' '.join(loud)
"""
# symbol, line in the file, broken line, split
BUGS = (
    ("add_all", 4, "        total += valeu", Split.DEMONSTRATION),
    ("add_all", 2, "    total = values", Split.DEMONSTRATION),
    ("add_all", 5, "    return value", Split.TRAIN),
    ("keep_even", 10, "    return values", Split.DEMONSTRATION),
    ("keep_even", 9, "    kept = [value for value in values if value % 2 != 0]", Split.HELD_OUT),
    ("largest_gap", 16, "    return min(gaps, default=0)", Split.HELD_OUT_FUNCTION),
)


@pytest.fixture
def problems_directory(tmp_path: Path) -> Path:
    """problems.jsonl and repositories/tiny."""
    return write_problems(tmp_path / "problems")


def write_problems(root: Path) -> Path:
    files = root / "repositories" / "tiny" / "files"
    (files / "tiny").mkdir(parents=True)
    (files / "tests").mkdir()
    (files / "tiny" / "__init__.py").write_text("")
    (files / "tiny" / "core.py").write_text(MODULE)
    (files / "tiny" / "extra.py").write_text(OTHER_MODULE)
    (files / "tests" / "test_core.py").write_text(TESTS)
    repository = PreparedRepository.from_directory("tiny", files, ("tiny",), ("tests",))
    repository.save()
    problems = [make_problem(repository.fingerprint, index) for index in range(len(BUGS))]
    text = "".join(problem.model_dump_json() + "\n" for problem in problems)
    (root / PROBLEMS_FILE).write_text(text)
    return root


def make_problem(fingerprint: str, index: int) -> Problem:
    """One of BUGS as a record."""
    symbol, line_number, broken, split = BUGS[index]
    lines = MODULE.split("\n")
    first_line = lines.index(next(line for line in lines if line.startswith(f"def {symbol}("))) + 1
    return Problem(
        problem_id=f"tiny-{index}",
        repository="tiny",
        repository_fingerprint=fingerprint,
        kind="mutation",
        operator="by_hand",
        path="tiny/core.py",
        symbol=symbol,
        first_line=first_line,
        last_line=first_line + 3,
        prompt=f"Fix {symbol} in tiny/core.py",
        edits=(
            LineEdit(
                path="tiny/core.py",
                line_number=line_number,
                gold_text=lines[line_number - 1],
                broken_text=broken,
            ),
        ),
        fail_to_pass=(f"tests/test_core.py::test_{symbol}",),
        pass_to_pass=(),
        split=split,
    )
