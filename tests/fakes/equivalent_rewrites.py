"""Ways to write a function otherwise that keep what its callers see: one file each, made from the original's
syntax tree. `rewrite_function`: by the name of the way, the changed files. A way that does not fit is left out.
"""

import ast
from collections.abc import Callable

from ostinato.infra.platform.syntax import parse_python
from tests.fakes.equivalent_forms import (
    a_lambda,
    a_lambda_alone,
    a_partial,
    annotated,
    built_by_call,
    callable_object,
    decorated,
    decorated_without_wraps,
    extracted_function,
    helper_assigned,
    inherited,
    moved,
    nested,
)
from tests.fakes.equivalent_statements import (
    comprehension_to_loop,
    de_morgan,
    early_return,
    extracted_constant,
    generator_expression,
    loop_to_comprehension,
    match_for_if,
    named_result,
    nest_what_follows,
    renamed_locals,
    reordered_branches,
    ternary_or_if,
    tried,
    while_or_for,
    yield_from_or_loop,
)
from tests.fakes.rewriting import DoesNotFit, Place

REWRITES: dict[str, Callable[[Place], tuple[str, str] | None]] = {
    "helper assigned": helper_assigned, "lambda": a_lambda, "lambda alone": a_lambda_alone,
    "decorated": decorated, "decorated without wraps": decorated_without_wraps, "nested": nested,
    "comprehension to loop": comprehension_to_loop, "loop to comprehension": loop_to_comprehension,
    "what follows nested": nest_what_follows, "early return": early_return,
    "renamed locals": renamed_locals, "reordered branches": reordered_branches,
    "partial": a_partial, "inherited": inherited, "built by call": built_by_call,
    "yield from or loop": yield_from_or_loop, "generator expression": generator_expression,
    "named result": named_result, "De Morgan": de_morgan, "ternary or if": ternary_or_if,
    "while or for": while_or_for, "extracted constant": extracted_constant,
    "extracted function": extracted_function, "moved": moved, "match for if": match_for_if,
    "tried": tried, "annotated": annotated, "callable object": callable_object,
}  # fmt: skip  # fmt: skip


def rewrite_function(source: bytes, path: str, symbol: str) -> dict[str, dict[str, bytes]]:
    """By name of the way, the changed files."""
    found: dict[str, dict[str, bytes]] = {}
    laid_out = ast.unparse(parse_python(source))
    for name, rewrite in REWRITES.items():
        try:
            place = Place(parse_python(source), path, symbol)
            beside = rewrite(place)
            text = ast.unparse(ast.fix_missing_locations(place.tree))
        except DoesNotFit:
            continue
        if text != laid_out:
            found[name] = {path: text.encode() + b"\n"}
            if beside is not None:
                found[name][beside[0]] = beside[1].encode() + b"\n"
    return found
