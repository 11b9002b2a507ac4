"""Single-line bugs: exact replacements of a piece of one source line.

An operator is a function of one syntax node. It yields pairs of the node to replace and the new text.
"""

import ast
import builtins
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ostinato.infra.platform.syntax import parse_python

Replacement = tuple[ast.AST, str]
Scope = tuple[str, ...]  # parameters and local variables of the function, in order of appearance
Operator = Callable[[ast.AST, Scope], Iterator[Replacement]]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One broken line of a function."""

    operator: str
    line_number: int  # 1-based in the function
    gold_text: str
    broken_text: str
    undefined_name: str = ""  # name that the mutation leaves undefined, if known


_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">="),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<="),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-",),
    ast.Sub: ("+",),
    ast.Mult: ("+", "//"),
    ast.Div: ("*", "//"),
    ast.FloorDiv: ("*", "/"),
    ast.Mod: ("//", "*"),
    ast.Pow: ("*",),
    ast.BitAnd: ("|",),
    ast.BitOr: ("&",),
    ast.BitXor: ("&",),
    ast.LShift: (">>",),
    ast.RShift: ("<<",),
}
_METHODS = {
    "append": "extend", "extend": "append", "add": "discard", "discard": "add", "get": "pop",
    "pop": "get", "items": "keys", "keys": "values", "values": "keys", "update": "setdefault",
    "setdefault": "get", "popleft": "pop", "appendleft": "append", "insert": "append",
    "remove": "pop", "union": "intersection", "intersection": "union", "startswith": "endswith",
    "endswith": "startswith", "lower": "upper", "upper": "lower", "strip": "lstrip",
    "split": "rsplit", "find": "rfind", "copy": "clear", "from_iterable": "__call__",
    "rotate": "extend", "index": "count", "count": "index", "join": "split",
}  # fmt: skip
_FUNCTIONS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "islice": "repeat",
    "takewhile": "dropwhile", "dropwhile": "takewhile", "sorted": "reversed", "reversed": "sorted",
    "list": "set", "set": "list", "tuple": "list", "filter": "map", "map": "filter",
    "zip_longest": "zip", "zip": "zip_longest", "combinations": "permutations",
    "permutations": "combinations", "filterfalse": "filter",
}  # fmt: skip


def _wrong_variable(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in scope:
        for name in scope:
            if name != node.id:
                yield node, name


def _name_typo(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and len(node.id) >= 3:
        name = node.id
        middle = len(name) // 2
        swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
        for typo in (name[:-1], swapped, name[0] + name):
            if typo != name and typo not in scope and not hasattr(builtins, typo):
                yield node, typo


def _keyword_swap(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and node.value is None:
        yield node, "False"
    elif isinstance(node, ast.BoolOp):
        other = copy.deepcopy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, ast.unparse(other)
    elif isinstance(node, ast.Break):
        yield node, "continue"
    elif isinstance(node, ast.Continue):
        yield node, "break"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield node, f"yield {ast.unparse(node.value)}"
    elif (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Yield)
        and node.value.value is not None
    ):
        yield node, f"return {ast.unparse(node.value.value)}"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.YieldFrom):
        yield node, f"yield {ast.unparse(node.value.value)}"


def _deleted_statement(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(
        node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Break, ast.Continue)
    ):
        yield node, "pass"


def _unwrapped_call(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return
    if not isinstance(node.args[0], (ast.Starred, ast.GeneratorExp)):
        yield node, ast.unparse(node.args[0])


def _comparison(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        for symbol in _COMPARISONS.get(type(node.ops[0]), ()):
            yield node, f"{left} {symbol} {right}"


def _arithmetic(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.BinOp):
        for symbol in _ARITHMETIC.get(type(node.op), ()):
            yield node, f"{_operand(node.left)} {symbol} {_operand(node.right)}"
    elif isinstance(node, ast.AugAssign):
        for symbol in _ARITHMETIC.get(type(node.op), ()):
            yield node, f"{ast.unparse(node.target)} {symbol}= {ast.unparse(node.value)}"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node, _operand(node.operand)


def _integer(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, str(node.value + 1)
        if node.value > 0:
            yield node, str(node.value - 1)


def _negated_condition(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            yield node.test, ast.unparse(node.test.operand)
        elif not isinstance(node.test, ast.Constant):
            yield node.test, f"not {_operand(node.test)}"


def _swapped_arguments(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Call) and not any(
        isinstance(argument, ast.Starred) for argument in node.args
    ):
        for position in range(len(node.args) - 1):
            other = copy.deepcopy(node)
            pair = other.args[position : position + 2]
            other.args[position : position + 2] = reversed(pair)
            yield node, ast.unparse(other)


def _dropped_argument(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Call):
        for position in range(len(node.args)):
            other = copy.deepcopy(node)
            del other.args[position]
            yield node, ast.unparse(other)
        for position in range(len(node.keywords)):
            other = copy.deepcopy(node)
            del other.keywords[position]
            yield node, ast.unparse(other)


def _wrong_method(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Attribute) and node.attr in _METHODS:
        other = copy.deepcopy(node)
        other.attr = _METHODS[node.attr]
        yield node, ast.unparse(other)
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
    ):
        yield node.func, _FUNCTIONS[node.func.id]


def _dropped_subscript(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield node, ast.unparse(node.value)


def _slice_bound(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        value, bounds = ast.unparse(node.value), node.slice
        lower = ast.unparse(bounds.lower) if bounds.lower else ""
        upper = ast.unparse(bounds.upper) if bounds.upper else ""
        if bounds.step is None and (lower or upper):
            yield node, f"{value}[{upper}:{lower}]"
            if lower:
                yield node, f"{value}[:{upper}]"
            if upper:
                yield node, f"{value}[{lower}:]"


def _dropped_guard(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    """Makes a branch never run, or a filter of a comprehension always hold."""
    if isinstance(node, ast.If) and not isinstance(node.test, ast.Constant):
        yield node.test, "False"
    elif isinstance(node, ast.comprehension):
        for condition in node.ifs:
            yield condition, "True"


def _wrong_return(node: ast.AST, scope: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield node.value, "None"
        if isinstance(node.value, ast.IfExp):
            yield node.value, ast.unparse(node.value.body)
            yield node.value, ast.unparse(node.value.orelse)


_OPERATORS: tuple[Operator, ...] = (
    _wrong_variable, _name_typo, _keyword_swap, _deleted_statement, _unwrapped_call, _comparison,
    _arithmetic, _integer, _negated_condition, _swapped_arguments, _dropped_argument, _wrong_method,
    _dropped_subscript, _slice_bound, _dropped_guard, _wrong_return,
)  # fmt: skip
OPERATORS = {operator.__name__.removeprefix("_"): operator for operator in _OPERATORS}

# share of each operator in the mutations of toolz and more-itertools that a test notices, in percent
NOTICED_SHARES: dict[str, float] = {
    "wrong_variable": 23, "name_typo": 19, "dropped_argument": 14, "deleted_statement": 10,
    "keyword_swap": 7, "swapped_arguments": 5, "wrong_return": 5, "unwrapped_call": 5,
    "wrong_method": 4, "integer": 3, "negated_condition": 2, "dropped_guard": 2, "comparison": 2,
    "arithmetic": 1, "dropped_subscript": 1, "slice_bound": 0.5,
}  # fmt: skip


def mutate_function(lines: Sequence[str]) -> list[Mutation]:
    """Every single-line mutation of a function that still parses and changes the line.

    `lines` begin with `def` at the left margin. Each broken line occurs once, from the first operator that makes it.
    """
    tree = parse_python("\n".join(lines)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    scope = _local_names(tree)
    nodes = [node for node in ast.walk(tree) if node is not tree]
    seen: set[tuple[int, str]] = set()
    mutations: list[Mutation] = []
    for name, operator in OPERATORS.items():
        for node in nodes:
            for target, new_text in operator(node, scope):
                mutation = replace_node(lines, name, target, new_text)
                if mutation is None or (mutation.line_number, mutation.broken_text) in seen:
                    continue
                if mutation_parses(lines, mutation):
                    seen.add((mutation.line_number, mutation.broken_text))
                    mutations.append(mutation)
    return mutations


def replace_node(
    lines: Sequence[str], operator: str, target: ast.AST, new_text: str
) -> Mutation | None:
    """The mutation that replaces the target's columns. None if the target spans lines or nothing changes."""
    assert isinstance(target, (ast.expr, ast.stmt))
    if target.end_lineno != target.lineno or target.end_col_offset is None or "\n" in new_text:
        return None
    gold = lines[target.lineno - 1]
    encoded = gold.encode()  # syntax columns count bytes
    old_text = encoded[target.col_offset : target.end_col_offset].decode()
    before = encoded[: target.col_offset].decode()
    after = encoded[target.end_col_offset :].decode()
    for candidate in (before + new_text + after, f"{before}({new_text}){after}"):
        is_whole = _same_as(candidate, before, new_text, after)
        if candidate != gold and old_text != new_text and is_whole:
            return Mutation(operator, target.lineno, gold, candidate)
    return None


def _same_as(candidate: str, before: str, new_text: str, after: str) -> bool:
    """Whether the line has the intended meaning: it parses to the same tree with the new text in parentheses."""
    if candidate.strip() in ("pass", "break", "continue") or not before.strip():
        return True
    try:
        bare = ast.dump(parse_python(_complete(candidate)))
        bracketed = ast.dump(parse_python(_complete(f"{before}({new_text}){after}")))
    except SyntaxError:
        return True  # the line is part of a statement; the whole function is parsed later
    return bare == bracketed


def _complete(line: str) -> str:
    stripped = line.strip()
    if stripped.startswith(("elif ", "else:", "except", "finally")):
        stripped = stripped.replace("elif ", "if ", 1)
    body = f"{stripped} pass" if stripped.endswith(":") else stripped
    return f"def scope():\n    {body}" if body.startswith(("return", "yield")) else body


def mutation_parses(lines: Sequence[str], mutation: Mutation) -> bool:
    """Whether a function with the broken line is still one statement of Python."""
    changed = list(lines)
    changed[mutation.line_number - 1] = mutation.broken_text
    try:
        return len(parse_python("\n".join(changed)).body) == 1
    except SyntaxError:
        return False


def _local_names(function: ast.FunctionDef) -> Scope:
    names: dict[str, None] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            names.setdefault(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id)
    return tuple(names)


def _operand(node: ast.expr) -> str:
    """Text of an expression, in parentheses if a binary operator next to it could change its meaning."""
    text = ast.unparse(node)
    is_atom = isinstance(node, (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript))
    return text if is_atom else f"({text})"
