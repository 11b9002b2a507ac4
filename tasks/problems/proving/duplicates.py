"""Functions that one repository copied from another, which the splits of repositories do not show."""

import ast
import textwrap
from collections.abc import Sequence

from ostinato.infra.platform.syntax import parse_python
from ostinato.tasks.records import Problem, Split

_SIZE = 5
_MIN_SHINGLES = 40  # short functions are alike by nature
_EVALUATED = (Split.HELD_OUT, Split.HELD_OUT_FUNCTION)


def shingle(text: str) -> frozenset[int]:
    """Runs of syntax nodes with names left out: what stays when a definition is renamed."""
    try:
        tree = parse_python(textwrap.dedent(text))
    except SyntaxError:
        return frozenset()
    kinds = [
        f"{type(node).__name__} {node.value!r}"
        if isinstance(node, ast.Constant)
        else type(node).__name__
        for node in ast.walk(tree)
    ]
    return frozenset(
        hash(tuple(kinds[start : start + _SIZE])) for start in range(len(kinds) - _SIZE + 1)
    )


def find_duplicates(problems: Sequence[tuple[Problem, str]], max_ratio: float) -> frozenset[str]:
    """Ids of problems outside the evaluation splits whose symbol nearly equals one inside."""
    evaluated: set[frozenset[int]] = set()
    others: dict[frozenset[int], list[str]] = {}
    shingles = {text: shingle(text) for text in {text for _, text in problems}}
    for problem, text in problems:
        found = shingles[text]
        if len(found) < _MIN_SHINGLES:
            continue
        if problem.split in _EVALUATED:
            evaluated.add(found)
        else:
            others.setdefault(found, []).append(problem.problem_id)
    return frozenset(
        name
        for found, names in others.items()
        for name in names
        if any(similarity(found, other) > max_ratio for other in evaluated)
    )


def similarity(one: frozenset[int], other: frozenset[int]) -> float:
    """Shared shingles over all, 0 to 1."""
    if min(len(one), len(other)) == 0 or 2 * len(one) < len(other) or 2 * len(other) < len(one):
        return 0.0
    return len(one & other) / len(one | other)
