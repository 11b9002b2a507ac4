"""Code outside the problem that a change touches: emptied functions, failures of the suite, modules to call."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ostinato.infra.platform.syntax import Defined, parse_once, walk_definitions
from ostinato.infra.sandbox.inside.sources import function_of
from ostinato.infra.sandbox.protocol import TestOutcome
from ostinato.infra.sandbox.repository import PreparedRepository, module_of
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.records import Problem

SUITE_LIMITS = 6.0  # time for the whole suite, in limits of one run
_MAX_NAMED = 3
Files = Mapping[str, bytes | None]


@dataclass(frozen=True)
class OtherCode:
    """Changed files in which more than the problem's own functions changed."""

    modules: tuple[tuple[str, tuple[str, ...]], ...]
    """importable name, and its functions that the problem is about"""
    emptied: tuple[str, ...]

    @classmethod
    def of(cls, problem: Problem, repository: PreparedRepository, changed: Files) -> "OtherCode":
        """`changed`: editable files that differ from the pristine repository."""
        broken = problem.break_files(repository.files)
        modules: list[tuple[str, tuple[str, ...]]] = []
        emptied: list[str] = []
        for path, after in changed.items():
            before = repository.files.get(path)
            if before is None or path.endswith("__main__.py"):
                continue
            is_own = (
                problem.old_place is None
            )  # users of a refactored function must do what they did
            own = _differing(before, broken.get(path, before)) if is_own else set[str]()
            own |= {problem.symbol} if path == problem.path else set()
            if after is not None and _without(before, own) == _without(after, own):
                continue
            modules.append((module_of(path), tuple(sorted(own))))
            emptied += [f"{path}:{name}" for name in _emptied(before, after or b"") - own]
        return cls(tuple(modules), tuple(sorted(emptied)))


async def find_suite_failures(
    server: TestServer, changed: Files, time_limit_seconds: float
) -> list[str]:
    """Tests of the whole repository that pass on the original, fail twice with the change, and pass once more when
    the original's whole suite is repeated. The repetition excludes tests that fail because the machine is busy.
    """
    limit = SUITE_LIMITS * time_limit_seconds
    if not server.tests:
        await server.run({}, (), limit)
    original = await server.run({}, server.tests, limit)
    if TestOutcome.TIMEOUT in original.outcomes.values():
        # tests after the timeout may not have run, and the cache keeps the incomplete report
        original = await server.run_again({}, server.tests, limit)
    passing = tuple(test for test in server.tests if test in original.passed_ids)  # in suite order
    failing = list(passing)
    # all tests run each time, because a test may pass only after another
    for run in (server.run, server.run_again):
        report = await run(changed, passing, limit)
        # a test id may contain a time or an address, so it is missing only if its whole function is
        known = {
            function_of(test)
            for test, outcome in report.outcomes.items()
            if outcome is not TestOutcome.MISSING
        }
        failing = [
            test
            for test in failing
            if test not in report.passed_ids
            and (report.outcomes[test] is not TestOutcome.MISSING or function_of(test) not in known)
        ]
        if not failing:
            return []
    control = await server.run_again({}, server.tests, limit)
    return [test for test in failing if test in control.passed_ids]


def name_some(found: list[str] | tuple[str, ...]) -> str:
    """The first few names, and the number of the others."""
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(found[:_MAX_NAMED]) + more


def _definitions(content: bytes) -> dict[str, Defined]:
    try:
        return dict(walk_definitions(parse_once(content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}


def _differing(one: bytes, two: bytes) -> set[str]:
    """Functions that differ between two files, or exist in one of them only."""
    first, second = _definitions(one), _definitions(two)
    return {
        name
        for name in first.keys() | second.keys()
        if not isinstance(first.get(name) or second[name], ast.ClassDef)
        and _dump(first.get(name)) != _dump(second.get(name))
    }


def _dump(node: ast.AST | None) -> str:
    return "" if node is None else ast.dump(node)


def _without(content: bytes, names: set[str]) -> str:
    """The normalized text of a file without some functions."""
    left_out = {id(node) for name, node in _definitions(content).items() if name in names}

    def statements(body: list[ast.stmt], depth: int) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef) and id(node) not in left_out:
                head = [*map(ast.dump, (*node.decorator_list, *node.bases, *node.keywords))]
                yield f"{depth} {node.name} {head}"
                yield from statements(node.body, depth + 1)
            elif id(node) not in left_out:
                yield ast.dump(node)

    try:
        return "\n".join(statements(parse_once(content).body, 0))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "unreadable"


def _emptied(before: bytes, after: bytes) -> set[str]:
    """Functions that no longer do anything, or only raise NotImplementedError."""
    old = _definitions(before)
    return {
        name
        for name, node in _definitions(after).items()
        if name in old and _is_empty(node) and not _is_empty(old[name])
    }


def _is_empty(node: Defined) -> bool:
    if isinstance(node, ast.ClassDef):
        return False
    body = node.body[ast.get_docstring(node) is not None :]
    if not body:
        return True
    (first, *others) = body
    if isinstance(first, ast.Raise) and first.exc is not None:
        return "NotImplementedError" in ast.unparse(first.exc)
    is_nothing = isinstance(first, ast.Pass) or (
        isinstance(first, ast.Expr | ast.Return)
        and isinstance(first.value, ast.Constant | type(None))
    )
    return is_nothing and not others
