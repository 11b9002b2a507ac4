"""Hides failing tests from the agent by cutting them out of its test files. The verifier has the pristine files."""

import ast
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ostinato.infra.platform.syntax import parse_once
from ostinato.tasks.problems.breaking.candidates import LinePlan
from ostinato.tasks.records import BlockEdit


def hide_tests(
    failing: Sequence[str], files: Mapping[str, bytes], share: float, seed: str
) -> tuple[tuple[str, ...], tuple[BlockEdit, ...]]:
    """Ids and cuts of a share of the failing test functions, drawn by the seed and rounded up.

    Functions that are created while the file is imported cannot be cut out, so they stay.
    """
    by_function: dict[str, list[str]] = defaultdict(list)
    for test in failing:
        by_function[test.partition("[")[0]].append(test)
    places = {name: _find(name, files) for name in by_function}
    can_hide = sorted(name for name, place in places.items() if place is not None)
    random.Random(seed).shuffle(can_hide)
    chosen = can_hide[: -(-int(share * 1000 * len(by_function)) // 1000)]
    plan = LinePlan(files)
    hidden: list[str] = []
    for name in chosen:
        place = places[name]
        assert place is not None
        path, node = place
        first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
        plan.replace(
            path, first, node.end_lineno or node.lineno, _placeholder_body(path, node, files)
        )
        hidden += by_function[name]
    if not plan.parses():
        return (), ()
    return tuple(test for test in failing if test in frozenset(hidden)), plan.blocks()


def function_names(tests: Sequence[str]) -> frozenset[str]:
    """Names of the test functions in test ids."""
    return frozenset(test.partition("[")[0].rpartition("::")[2] for test in tests)


def _find(name: str, files: Mapping[str, bytes]) -> tuple[str, ast.FunctionDef] | None:
    path, *parts = name.split("::")
    if path not in files:
        return None
    body: Sequence[ast.stmt] = parse_once(files[path]).body
    for part in parts[:-1]:
        classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == part]
        if len(classes) != 1:
            return None
        body = classes[0].body
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == parts[-1]]
    return (path, found[0]) if len(found) == 1 else None


def _placeholder_body(
    path: str, node: ast.FunctionDef, files: Mapping[str, bytes]
) -> tuple[str, ...]:
    """Lines in place of a cut test: `pass` for a method, so that its class is not left empty, else nothing."""
    for outer in ast.walk(parse_once(files[path])):
        if isinstance(outer, ast.ClassDef) and any(
            isinstance(item, ast.FunctionDef) and item.lineno == node.lineno for item in outer.body
        ):
            return (" " * node.col_offset + "pass",)
    return ()
