"""A package of one module with its tests, and problems of one broken line."""

from pathlib import Path

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.records import LineEdit, Problem, Split

PATH = "pkg/code.py"
TESTS = "tests/test_code.py"


def write_package(
    directory: Path, source: str, tests: str, name: str = "pkg"
) -> PreparedRepository:
    """The prepared repository of a module `pkg.code` and the tests of it."""
    for path, text in (("pkg/__init__.py", ""), (PATH, source), (TESTS, tests)):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return PreparedRepository.from_directory(name, directory, ("pkg",), ("tests",))


def break_line(
    repository: PreparedRepository,
    line: str,
    broken: str,
    *,
    symbol: str,
    failing: tuple[str, ...],
    path: str = PATH,
) -> Problem:
    """`line` stands once in the file; `failing` are the tests that fail with `broken` in its place."""
    number = repository.files[path].decode().split("\n").index(line) + 1
    return Problem(
        problem_id=f"{repository.name}-{symbol}",
        repository=repository.name,
        repository_fingerprint=repository.fingerprint,
        kind="mutation",
        operator="integer",
        path=path,
        symbol=symbol,
        first_line=number - 1,
        last_line=number,
        prompt=f"Fix {symbol} in {path}",
        edits=(LineEdit(path=path, line_number=number, gold_text=line, broken_text=broken),),
        fail_to_pass=failing,
        split=Split.TRAIN,
    )


def make_one_line_problem(
    directory: Path, source: str, tests: str, edit: tuple[str, str], *, symbol: str, failing: str
) -> tuple[PreparedRepository, Problem]:
    """A package of its own, and the problem of an edit: a line of `source` and the broken one."""
    repository = write_package(directory, source, tests)
    return repository, break_line(
        repository, *edit, symbol=symbol, failing=(f"{TESTS}::{failing}",)
    )
