"""Bugs with one cause in two to five places of several functions.

The cause is a wrong idea that the code follows wherever it occurs: one mutation of equal bounds, values, conditions or
calls, swapped parameters with the arguments of all calls, or a key or attribute with another name where it is written.
"""

import ast
import builtins
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from ostinato.infra.platform.syntax import parse_python
from ostinato.tasks.problems.breaking.candidates import Candidate, draw_rank, take_turns
from ostinato.tasks.problems.breaking.definitions import Definition, lines_at_margin
from ostinato.tasks.problems.breaking.mutations import OPERATORS, mutation_parses, replace_node
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.records import LineEdit

_PLACES = range(2, 6)
_LEAST_NUMBER = 3  # smaller numbers are equal by chance
_REPEATED = (
    "comparison", "arithmetic", "integer", "swapped_arguments", "dropped_argument", "wrong_method",
    "slice_bound", "unwrapped_call", "negated_condition", "dropped_guard",
)  # fmt: skip
Cause = tuple[str, ...]  # operator, scope, and what makes changes the same idea
Change = tuple[Cause, ast.AST, str]  # with a node and its wrong text
Spot = tuple[Definition, Sequence[str], ast.AST, str]
LinesOf = Callable[[str], Sequence[str]]


def find_multi_place(
    repository: str, definitions: Sequence[Definition], lines_of: LinesOf, seed: int = 0
) -> Iterator[Candidate]:
    """Candidates in some functions, each operator in turn; those over several files first, then in an order drawn by the
    seed. `lines_of`: lines of a file.
    """
    causes: dict[Cause, list[Spot]] = defaultdict(list)
    read: set[str] = set()
    for definition in definitions:
        lines = lines_at_margin(definition, lines_of(definition.path))
        if lines is not None:
            tree = parse_python("\n".join(lines)).body[0]
            scope = (definition.path, definition.qualified_name.rpartition(".")[0])
            for found in (
                _repeat_mutations(tree, scope),
                _rename_written(tree, lines, scope, read),
            ):
                for cause, target, new_text in found:
                    causes[cause].append((definition, lines, target, new_text))
    by_operator: dict[str, list[Candidate]] = defaultdict(list)
    for cause, spots in sorted(causes.items(), key=lambda item: item[0]):
        if cause[0] != "renamed_key" or cause[-1] in read:
            candidate = _make_candidate(repository, cause[0], spots, lines_of)
            by_operator[cause[0]] += [candidate] if candidate else []

    def rank(item: Candidate) -> tuple[bool, str]:
        num_files = len({edit.path for edit in item.edits})
        return num_files == 1, draw_rank(f"{seed}", item.candidate_id)

    yield from take_turns(sorted(found, key=rank) for found in by_operator.values())


def _make_candidate(
    repository: str, operator: str, spots: Sequence[Spot], lines_of: LinesOf
) -> Candidate | None:
    """The candidate of a cause. None: too few or too many places, in one function alone, or two on one line."""
    functions = sorted({spot[0] for spot in spots}, key=lambda item: (item.path, item.first_line))
    if len(spots) not in _PLACES or len(functions) < 2:
        return None
    edits: dict[tuple[str, int], LineEdit] = {}
    for definition, lines, target, new_text in spots:
        mutation = replace_node(lines, operator, target, new_text)
        if mutation is None or not mutation_parses(lines, mutation):
            return None
        place = definition.path, definition.first_line + mutation.line_number - 1
        gold = lines_of(definition.path)[place[1] - 1]
        broken = gold.removesuffix(mutation.gold_text) + mutation.broken_text
        edits[place] = LineEdit(
            path=place[0], line_number=place[1], gold_text=gold, broken_text=broken
        )
    if len(edits) < len(spots):
        return None
    return Candidate.at(
        functions[0],
        repository=repository,
        kind=Kind.MULTI_PLACE,
        operator=operator,
        edits=tuple(edits[place] for place in sorted(edits)),
        touched=tuple(item.call_key for item in functions),
    )


def _repeat_mutations(tree: ast.stmt, scope: tuple[str, str]) -> Iterator[Change]:
    """Mutations of a function by idea. An idea of the repository's own may be wrong in all its files or in one file,
    another in one class or module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            if node is tree and not scope[1]:
                yield from _swap_parameters(node)
            continue
        part = _find_idea(node)
        if part is None:
            continue
        signs = [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]
        shape = [
            each.arg if isinstance(each, ast.keyword) else type(each).__name__ for each in signs
        ]
        count = len(node.args) if isinstance(node, ast.Call) else 0
        idea = (ast.unparse(part), f"{count} {shape[:8]}")
        for operator in _REPEATED:
            for number, (target, new_text) in enumerate(OPERATORS[operator](node, ())):
                for place in [("",), scope[:1]] if _is_own(part) else [scope]:
                    yield (operator, *place, *idea, f"{number}"), target, new_text


def _find_idea(node: ast.AST) -> ast.AST | None:
    """The part of a node that makes two changes of such nodes the same wrong idea."""
    match node:
        case (
            ast.Compare(comparators=[part]) | ast.BinOp(right=part) | ast.AugAssign(value=part)
            | ast.Call(func=part) | ast.Subscript(slice=part) | ast.IfExp(test=part)
            | ast.If(test=part) | ast.While(test=part)
        ):  # fmt: skip
            return part
        case ast.Attribute() | ast.Constant(value=int()) if _is_own(node):
            return node
        case _:
            return None


def _is_own(part: ast.AST) -> bool:
    """Whether an expression says something about this repository, so that it is the same idea in every file."""
    for node in ast.walk(part):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                return True
            case ast.Constant(value=int(value)) if abs(value) >= _LEAST_NUMBER:
                return True
            case _:
                pass
    return (
        isinstance(part, ast.Name)
        and len(part.id) > _LEAST_NUMBER
        and not hasattr(builtins, part.id)
    )


def _swap_parameters(function: ast.FunctionDef) -> Iterator[Change]:
    """The first two parameters of a definition swapped, if they have no defaults, together with calls of two arguments."""
    match function.args:
        case ast.arguments(posonlyargs=[], args=[one, two], defaults=[]):
            whole = ast.expr(
                lineno=one.lineno, col_offset=one.col_offset,
                end_lineno=two.end_lineno, end_col_offset=two.end_col_offset,
            )  # fmt: skip
            cause = ("swapped_arguments", "", function.name, "2 []", "0")
            yield cause, whole, f"{ast.unparse(two)}, {ast.unparse(one)}"
        case _:
            pass


def _rename_written(
    tree: ast.stmt, lines: Sequence[str], scope: tuple[str, str], read: set[str]
) -> Iterator[Change]:
    """Keys and attributes of `self` under another name where they are written. Adds the keys that are read to `read`."""
    for node in ast.walk(tree):
        keys: list[ast.expr | None] = []
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield ("renamed_attribute", *scope, name), node, f"self.{_rename(name)}"
            case ast.Subscript(slice=ast.Constant(value=str()) as key, ctx=ast.Store()):
                keys = [key]
            case ast.Dict():
                keys = node.keys
            case (
                ast.Subscript(slice=ast.Constant(value=str(name)))
                | ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_])
            ):
                read.add(name)
            case _:
                pass
        for key in keys:
            if isinstance(key, ast.Constant) and str(key.value).isidentifier():
                shown = ast.get_source_segment("\n".join(lines), key) or ""
                new_text = shown.replace(str(key.value), _rename(str(key.value)))
                for place in ("", scope[0]):
                    yield ("renamed_key", place, str(key.value)), key, new_text


def _rename(name: str) -> str:
    return name[:-1] if name.endswith("s") and len(name) > _LEAST_NUMBER else f"{name}s"
