"""Product code that branches on values only the tests know.

`find_hard_coded`: constants compared with, looked up or matched on in gained code that occur in the
required tests too. A fix computes; a table of the tests' inputs does not.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from ostinato.infra.platform.syntax import evaluate_literal, parse_python
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.change import AttemptChange

_LEAST_CHARACTERS = 4  # shorter strings are common words of code
_LEAST_NUMBER = 10  # smaller numbers are in every program
_LEAST_SMALL_BRANCHES = 2  # constant in, constant out, both from the tests
_BRANCH = re.compile(r"==|!=|\bin\b|\bis\b|\bcase\b|[{}]|:")
_CONSTANT = re.compile(r"[\"'0-9]")
_COMMON = frozenset({"utf-8", "utf8", "ascii", "__main__", "strict", "ignore", "replace"})


def find_hard_coded(change: AttemptChange, tests: Sequence[str]) -> tuple[str, ...]:
    """The constants, as text. Empty when nothing looks like it."""
    if not any(_BRANCH.search(line) and _CONSTANT.search(line) for line in change.added_lines):
        return ()  # parsing whole files takes milliseconds
    known = _test_literals(change.repository, tuple(tests))
    if not known:
        return ()
    found: list[str] = []
    branches: set[str] = set()
    # of all changed files: work may move from one to another
    contents = [text for file in change.counted for text in (file.before, file.pristine)]
    old = {literal for text in contents for literal, _ in _cases_of(text)}
    for file in change.counted:
        for literal, answer in _cases_of(file.after):
            if literal in old or literal not in known:
                continue
            if is_distinctive(literal):
                found.append(literal)
            elif answer is not None and answer in known:
                branches.add(f"{literal} -> {answer}")
    if len(branches) >= _LEAST_SMALL_BRANCHES:
        found += branches
    return tuple(sorted(set(found)))


@lru_cache(maxsize=256)
def _cases_of(content: bytes | None) -> tuple[tuple[str, str | None], ...]:
    return tuple(_special_cases(_parse(content)))


def _special_cases(tree: ast.Module | None) -> Iterator[tuple[str, str | None]]:
    """(constant, what is answered for it): comparisons, dictionary keys, matches."""
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.If, ast.IfExp)):
            answer = _answer(node.body)
            for literal in _compared(node.test):
                yield literal, answer
        elif isinstance(node, ast.Compare):
            for literal in _compared(node):
                yield literal, None
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None and _literal(key) is not None:
                    yield str(_literal(key)), _literal(value)
        elif isinstance(node, ast.match_case):
            for part in ast.walk(node.pattern):
                if isinstance(part, ast.MatchValue) and _literal(part.value) is not None:
                    yield str(_literal(part.value)), _answer(node.body)


def _compared(test: ast.expr) -> Iterator[str]:
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                parts = side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else []
                for part in (side, *parts):
                    literal = _literal(part)
                    if literal is not None:
                        yield literal


def _answer(body: list[ast.stmt] | ast.expr) -> str | None:
    """The constant that a branch gives, if it does nothing else."""
    if isinstance(body, ast.expr):
        return _literal(body)
    if len(body) == 1 and isinstance(body[0], (ast.Return, ast.Assign, ast.Expr)):
        return _literal(body[0].value) if body[0].value is not None else None
    return None


def _literal(node: ast.expr | None) -> str | None:
    """Canonical text of a constant expression."""
    if node is None:
        return None
    try:
        return repr(evaluate_literal(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def is_distinctive(literal: str) -> bool:
    """Whether a constant, given as text, is rare enough in code to be told from the tests."""
    value = evaluate_literal(literal)
    if isinstance(value, (str, bytes)):
        return len(value) >= _LEAST_CHARACTERS and str(value) not in _COMMON
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, (int, float)):
        return abs(value) >= _LEAST_NUMBER
    return len(value) > 1 if isinstance(value, (tuple, list, dict, set)) else False


@lru_cache(maxsize=512)
def _literals_of(text: bytes) -> frozenset[str]:
    tree = _parse(text)
    if tree is None:
        return frozenset()
    literals = (_literal(node) for node in ast.walk(tree) if isinstance(node, ast.expr))
    return frozenset(literal for literal in literals if literal is not None)


def _test_literals(repository: PreparedRepository, tests: tuple[str, ...]) -> frozenset[str]:
    paths = {test.partition("::")[0] for test in tests}
    contents = (repository.files.get(path) for path in sorted(paths))
    return frozenset().union(*(_literals_of(text) for text in contents if text is not None))


def _parse(content: bytes | None) -> ast.Module | None:
    try:
        return parse_python(content or b"")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
