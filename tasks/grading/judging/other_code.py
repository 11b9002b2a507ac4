"""Code beside the problem's that a change touches: what was emptied, what other tests say, what to call."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ostinato.infra.platform.syntax import Defined, parse_once, walk_definitions
from ostinato.infra.sandbox.protocol import TestOutcome
from ostinato.infra.sandbox.repository import PreparedRepository, module_of
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.records import Problem

_SUITE_LIMITS = 6.0  # of one run of the required tests
_MOST_NAMED = 3
Files = Mapping[str, bytes | None]


@dataclass(frozen=True)
class OtherCode:
    """The touched files in which more changed than what the problem asks for."""

    modules: tuple[tuple[str, tuple[str, ...]], ...]
    """importable name, and the functions in it that the problem is about"""
    emptied: tuple[str, ...]

    @classmethod
    def of(cls, problem: Problem, repository: PreparedRepository, changed: Files) -> "OtherCode":
        """`changed`: what differs from the pristine repository in editable files."""
        broken = problem.break_files(repository.files)
        modules: list[tuple[str, tuple[str, ...]]] = []
        emptied: list[str] = []
        for path, after in changed.items():
            before = repository.files.get(path)
            if before is None or path.endswith("__main__.py"):
                continue
            asked = _differing(before, broken.get(path, before))
            asked |= {problem.symbol} if path == problem.path else set()
            if after is not None and _without(before, asked) == _without(after, asked):
                continue
            modules.append((module_of(path), tuple(sorted(asked))))
            emptied += [f"{path}:{name}" for name in _emptied(before, after or b"") - asked]
        return cls(tuple(modules), tuple(sorted(emptied)))


async def find_suite_failures(
    server: TestServer, changed: Files, time_limit_seconds: float
) -> list[str]:
    """Tests of the whole repository that pass on the original, fail twice with the change, and pass when the original's
    whole suite runs once more: tests that fail because the machine is busy are not counted.
    """
    limit = _SUITE_LIMITS * time_limit_seconds
    if not server.tests:
        await server.run({}, (), limit)
    original = await server.run({}, server.tests, limit)
    if TestOutcome.TIMEOUT in original.outcomes.values():
        # tests after it may not have run, and the cache keeps that report
        original = await server.run_again({}, server.tests, limit)
    passing = tuple(test for test in server.tests if test in original.passed_ids)  # in their order
    failing = list(passing)
    # whole each time, because a test may pass only after another
    for run in (server.run, server.run_again):
        report = await run(changed, passing, limit)
        # an id may hold a time or an address: one is gone only where its whole function is
        known = {
            test.partition("[")[0]
            for test, outcome in report.outcomes.items()
            if outcome is not TestOutcome.MISSING
        }
        failing = [
            test
            for test in failing
            if test not in report.passed_ids
            and (
                report.outcomes[test] is not TestOutcome.MISSING
                or test.partition("[")[0] not in known
            )
        ]
        if not failing:
            return []
    control = await server.run_again({}, server.tests, limit)
    return [test for test in failing if test in control.passed_ids]


def name_some(found: list[str] | tuple[str, ...]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + more


def _definitions(content: bytes) -> dict[str, Defined]:
    try:
        return dict(walk_definitions(parse_once(content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}


def _differing(one: bytes, two: bytes) -> set[str]:
    """Functions that one of two files lacks or has otherwise."""
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
    """The text of a file without some functions, in one layout."""
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
    """Functions that do nothing any more, or only raise NotImplementedError."""
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
