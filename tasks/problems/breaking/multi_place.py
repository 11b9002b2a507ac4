"""Bugs with one cause in two to five places of several functions.

The cause is a wrong idea that the code follows wherever the idea occurs: one mutation of equal bounds, values, conditions
or calls; a key or attribute with another name where it is written; two swapped parameters of a definition and the
arguments of some of its calls.
"""

import ast
import builtins
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ostinato.infra.platform.syntax import parse_python
from ostinato.tasks.problems.breaking.candidates import Candidate, draw_rank, take_turns
from ostinato.tasks.problems.breaking.definitions import Definition, lines_at_margin
from ostinato.tasks.problems.breaking.mutations import (
    OPERATORS,
    Mutation,
    mutation_parses,
    replace_node,
)
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.records import LineEdit

_PLACES = range(2, 6)
_LEAST_OWN_NUMBER = 3  # smaller numbers are equal by chance
_LEAST_KEY = 3  # characters of a key
_REPEATED = (
    "comparison", "arithmetic", "integer", "swapped_arguments", "dropped_argument", "wrong_method",
    "slice_bound", "unwrapped_call", "negated_condition", "dropped_guard",
)  # fmt: skip
Cause = tuple[str, ...]  # operator, scope, and what makes changes the same idea


@dataclass(frozen=True)
class _Function:
    """A covered function with its lines at the left margin and their tree."""

    definition: Definition
    lines: list[str]
    tree: ast.AST

    @property
    def owner(self) -> str:
        return self.definition.qualified_name.rpartition(".")[0]


@dataclass(frozen=True)
class _Spot:
    """One place of a cause: a node of a function and its wrong text."""

    function: _Function
    target: ast.AST
    new_text: str

    def mutate(self, operator: str) -> Mutation | None:
        """The changed line. None: the node spans lines, or the result is no Python."""
        mutation = replace_node(self.function.lines, operator, self.target, self.new_text)
        return mutation if mutation and mutation_parses(self.function.lines, mutation) else None


_Causes = dict[Cause, list[_Spot]]


def find_multi_place(
    repository: str,
    definitions: Sequence[Definition],
    lines_of: Callable[[str], Sequence[str]],
    seed: int = 0,
) -> Iterator[Candidate]:
    """Candidates in some functions, each operator in turn; those over several files first, then in an order drawn by the
    seed. `lines_of`: lines of a file.
    """
    functions: list[_Function] = []
    for definition in definitions:
        at_margin = lines_at_margin(definition, lines_of(definition.path))
        if at_margin is not None:
            tree = parse_python("\n".join(at_margin)).body[0]
            functions.append(_Function(definition, at_margin, tree))
    causes: _Causes = defaultdict(list)
    for function in functions:
        for cause, spot in (*_repeat_mutations(function), *_rename_attributes(function)):
            causes[cause].append(spot)
    causes |= _rename_keys(functions)
    causes |= _swap_parameters(functions)
    by_operator: dict[str, list[Candidate]] = defaultdict(list)
    for (operator, *_), spots in sorted(causes.items(), key=lambda item: item[0]):
        found = _make_candidate(repository, operator, spots, lines_of)
        by_operator[operator] += [found] if found is not None else []

    def rank(item: Candidate) -> tuple[bool, str]:
        num_files = len({edit.path for edit in item.edits})
        return num_files == 1, draw_rank(f"{seed}", item.candidate_id)

    yield from take_turns(sorted(found, key=rank) for found in by_operator.values())


def _make_candidate(
    repository: str,
    operator: str,
    spots: Sequence[_Spot],
    lines_of: Callable[[str], Sequence[str]],
) -> Candidate | None:
    """The candidate of a cause. None: too few or too many places, in one function alone, or two on one line."""
    functions = {spot.function.definition: None for spot in spots}
    if len(spots) not in _PLACES or len(functions) < 2:
        return None
    edits: dict[tuple[str, int], LineEdit] = {}
    for spot in spots:
        mutation, definition = spot.mutate(operator), spot.function.definition
        if mutation is None:
            return None
        number = definition.first_line + mutation.line_number - 1
        gold = lines_of(definition.path)[number - 1]
        margin = gold[: len(gold) - len(mutation.gold_text)]
        edits[definition.path, number] = LineEdit(
            path=definition.path,
            line_number=number,
            gold_text=gold,
            broken_text=margin + mutation.broken_text,
        )
    if len(edits) < len(spots):
        return None
    ordered = sorted(functions, key=lambda item: (item.path, item.first_line))
    return Candidate.at(
        ordered[0],
        repository=repository,
        kind=Kind.MULTI_PLACE,
        operator=operator,
        edits=tuple(edits[place] for place in sorted(edits)),
        touched=tuple(item.call_key for item in ordered),
    )


def _repeat_mutations(function: _Function) -> Iterator[tuple[Cause, _Spot]]:
    """Mutations of a function by idea: for an idea of the repository's own in all its files and in the file, for another
    in the class or module.
    """
    path = function.definition.path
    for node in itertools.islice(ast.walk(function.tree), 1, None):
        for operator in _REPEATED:
            for number, (target, new_text) in enumerate(OPERATORS[operator](node, ())):
                idea = _find_idea(operator, node, number)
                if idea is None:
                    continue
                shown, part = idea
                cause = (shown, ast.unparse(part), f"{number}")
                scopes = [("",), (path,)] if _is_own(part) else [(path, function.owner)]
                for scope in scopes:
                    yield (operator, *scope, *cause), _Spot(function, target, new_text)


def _find_idea(operator: str, node: ast.AST, number: int) -> tuple[str, ast.AST] | None:
    """What makes two changes by an operator the same wrong idea: a word and a part of the tree."""
    match node:
        case ast.Compare(ops=[sign], comparators=[right]):
            return type(sign).__name__, right
        case ast.BinOp(op=sign, right=part) | ast.AugAssign(op=sign, value=part):
            return type(sign).__name__, part
        case ast.Call(func=called) if operator == "dropped_argument":
            named = node.keywords[number - len(node.args) :] if number >= len(node.args) else []
            return (named[0].arg or "") if named else "", called
        case ast.Call(func=called):
            return "", called
        case ast.Subscript(slice=part):
            return "", part
        case ast.If(test=part) | ast.While(test=part) | ast.IfExp(test=part):
            return "", part
        case ast.Constant(value=int(value)) if abs(value) >= _LEAST_OWN_NUMBER:
            return "", node
        case ast.Attribute():
            return "", node
        case _:
            return None


def _is_own(part: ast.AST) -> bool:
    """Whether an expression says something about this repository, so that it is the same idea in every file."""
    for node in ast.walk(part):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                return True
            case ast.Call(func=ast.Name(id=name)) if not hasattr(builtins, name):
                return True
            case ast.Constant(value=int(value)) if abs(value) >= _LEAST_OWN_NUMBER:
                return True
            case _:
                pass
    return isinstance(part, ast.Name) and not hasattr(builtins, part.id) and len(part.id) > 3


def _rename_attributes(function: _Function) -> Iterator[tuple[Cause, _Spot]]:
    """Attributes of `self` under another name where a class sets them."""
    for node in ast.walk(function.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                cause = ("renamed_attribute", function.definition.path, function.owner, name)
                yield cause, _Spot(function, node, f"self.{_rename(name)}")
            case _:
                pass


def _rename_keys(functions: Sequence[_Function]) -> _Causes:
    """Keys under another name where they are written, if they are read anywhere."""
    causes: _Causes = defaultdict(list)
    read: set[str] = set()
    for function in functions:
        text = "\n".join(function.lines)
        for node in ast.walk(function.tree):
            written: list[ast.expr | None] = []
            match node:
                case ast.Subscript(slice=ast.Constant(value=str()) as key, ctx=ast.Store()):
                    written = [key]
                case ast.Dict(keys=keys):
                    written = [*keys]
                case ast.Call(func=ast.Attribute(attr="setdefault"), args=[key, *_]):
                    written = [key]
                case (
                    ast.Subscript(slice=ast.Constant(value=str(name)), ctx=ast.Load())
                    | ast.Call(
                        func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(str(name)), *_]
                    )
                    | ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()])
                ):
                    read.add(name)
                case _:
                    pass
            for key in written:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    name, shown = key.value, ast.get_source_segment(text, key)
                    if shown and name.isidentifier() and len(name) >= _LEAST_KEY:
                        spot = _Spot(function, key, shown.replace(name, _rename(name)))
                        for scope in ("", function.definition.path):
                            causes["renamed_key", scope, name].append(spot)
    return {cause: spots for cause, spots in causes.items() if cause[2] in read}


def _rename(name: str) -> str:
    return name[:-1] if name.endswith("s") and len(name) > _LEAST_KEY else f"{name}s"


def _swap_parameters(functions: Sequence[_Function]) -> _Causes:
    """Definitions with the first two parameters swapped, and the arguments in half of their calls."""
    by_name: dict[str, list[_Function]] = defaultdict(list)
    calls: dict[str, list[_Spot]] = defaultdict(list)
    for function in functions:
        by_name[function.definition.name].append(function)
        for node in ast.walk(function.tree):
            match node:
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                    for target, new_text in OPERATORS["swapped_arguments"](node, ()):
                        calls[name].append(_Spot(function, target, new_text))
                        break  # later ones swap other arguments
                case _:
                    pass
    causes: _Causes = {}
    for name, found in by_name.items():
        swapped = _swap_first_two(found[0]) if len(found) == 1 else []
        if swapped and calls[name]:
            half = calls[name][: -(-len(calls[name]) // 2)][: _PLACES.stop - 2]
            causes["swapped_parameters", name] = [*swapped, *half]
    return causes


def _swap_first_two(function: _Function) -> list[_Spot]:
    """The parameter list of a definition on one line with its first two parameters swapped. Empty: there are not two without
    defaults.
    """
    assert isinstance(function.tree, ast.FunctionDef)
    parameters = function.tree.args
    free = parameters.args[: len(parameters.args) - len(parameters.defaults)]
    if free and free[0].arg in ("self", "cls"):
        free = free[1:]
    if parameters.posonlyargs or len(free) < 2 or free[0].lineno != free[1].end_lineno:
        return []
    one, two = free[0], free[1]
    whole = ast.expr(
        lineno=one.lineno, col_offset=one.col_offset,
        end_lineno=two.end_lineno, end_col_offset=two.end_col_offset,
    )  # fmt: skip
    return [_Spot(function, whole, f"{ast.unparse(two)}, {ast.unparse(one)}")]
