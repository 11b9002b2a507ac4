"""A package of one module with its tests, and the problem of one broken line in it."""

from pathlib import Path

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.records import LineEdit, Problem, Split

PATH = "pkg/code.py"
TESTS = "tests/test_code.py"


def make_one_line_problem(
    directory: Path, *, source: str, tests: str, symbol: str, line: str, broken: str, failing: str
) -> tuple[PreparedRepository, Problem]:
    """`line` stands once in `source`; `failing` is the test that fails with `broken` in its place."""
    for path, text in (("pkg/__init__.py", ""), (PATH, source), (TESTS, tests)):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    repository = PreparedRepository.from_directory("pkg", directory, ("pkg",), ("tests",))
    number = source.split("\n").index(line) + 1
    problem = Problem(
        problem_id=symbol,
        repository="pkg",
        repository_fingerprint=repository.fingerprint,
        kind="mutation",
        operator="integer",
        path=PATH,
        symbol=symbol,
        first_line=number - 1,
        last_line=number,
        prompt=f"Fix {symbol}",
        edits=(LineEdit(path=PATH, line_number=number, gold_text=line, broken_text=broken),),
        fail_to_pass=(f"{TESTS}::{failing}",),
        pass_to_pass=(),
        split=Split.TRAIN,
    )
    return repository, problem
