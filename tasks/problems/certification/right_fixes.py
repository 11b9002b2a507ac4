"""Right fixes that are written differently from the original: rewrites that keep the function's behaviour.

`rewrite_original` returns the files of each fix by the name of the rewrite. A grader that refuses one of
them refuses a right fix.
"""

import ast
import io
import random
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence

from ostinato.infra.platform.syntax import parse_python, walk_definitions

Function = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_READS_FRAME = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"})
_SUFFIX = "_value"
_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def rewrite_original(
    original: Mapping[str, bytes], broken: Mapping[str, bytes], count: int, rng: random.Random
) -> dict[str, dict[str, bytes]]:
    """Up to `count` rewrites of the original files, all different. The first adds a comment, the
    second changes the layout; the others are drawn from the rewrites of the syntax tree.
    """
    fixes = {
        "a comment": {path: text + b"\n# repaired\n" for path, text in original.items()},
        "another layout": {path: _lay_out(parse_python(text)) for path, text in original.items()},
    }
    names = rng.sample(sorted(_REWRITERS), len(_REWRITERS))
    for name in names:
        files = {
            path: _rewrite(text, broken[path], [_REWRITERS[name]])
            for path, text in original.items()
        }
        if files != fixes["another layout"]:
            fixes[name] = files
    fixes["other literals"] = {
        path: _respell(text, _changed(text, broken[path])) for path, text in original.items()
    }
    if fixes["other literals"] == original:
        del fixes["other literals"]
    fixes["all at once"] = {
        path: _rewrite(text, broken[path], [_REWRITERS[name] for name in names])
        for path, text in original.items()
    }
    drawn = list(fixes)[:2] + rng.sample(list(fixes)[2:], len(fixes) - 2)
    kept: dict[str, dict[str, bytes]] = {}
    for name in drawn:
        if len(kept) < count and fixes[name] not in kept.values():
            kept[name] = fixes[name]
    return kept


def _lay_out(tree: ast.Module) -> bytes:
    return ast.unparse(tree).encode() + b"\n"


def _changed(original: bytes, broken: bytes) -> list[str]:
    """Functions that differ in the broken state, or are missing there."""
    before = {name: ast.dump(node) for name, node in walk_definitions(parse_python(broken))}
    return [
        name
        for name, node in walk_definitions(parse_python(original))
        if isinstance(node, Function) and before.get(name) != ast.dump(node)
    ]


def _rewrite(
    original: bytes, broken: bytes, rewriters: Sequence[Callable[[Function], None]]
) -> bytes:
    tree = parse_python(original)
    changed = frozenset(_changed(original, broken))
    for name, node in walk_definitions(tree):
        if name in changed and isinstance(node, Function) and not _reads_frame(node):
            for rewriter in rewriters:
                rewriter(node)
    return _lay_out(ast.fix_missing_locations(tree))


def _reads_frame(node: ast.AST) -> bool:
    return any(
        (isinstance(item, ast.Name) and item.id in _READS_FRAME)
        or (isinstance(item, ast.Attribute) and item.attr in _READS_FRAME)
        for item in ast.walk(node)
    )


def _rename_locals(function: Function) -> None:
    """Renames local variables that only assignments bind to a longer name."""
    arguments = {item.arg for item in ast.walk(function) if isinstance(item, ast.arg)}
    known = {item.id for item in ast.walk(function) if isinstance(item, ast.Name)} | arguments
    bound = {
        item.id
        for item in _own_nodes(function)
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    }
    otherwise = arguments | set(_bound_otherwise(function))
    renamed = {
        name: name + _SUFFIX
        for name in bound - otherwise
        if not name.startswith("__") and name + _SUFFIX not in known
    }
    for statement in function.body:  # defaults and decorators belong to the enclosing scope
        for item in ast.walk(statement):
            if isinstance(item, ast.Name):
                item.id = renamed.get(item.id, item.id)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Nodes of a function's own scope."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
            waiting += ast.iter_child_nodes(node)


def _bound_otherwise(function: Function) -> Iterator[str]:
    """Names that are bound by anything other than an assignment in the function's own scope."""
    for item in ast.walk(function):
        if isinstance(item, ast.Global | ast.Nonlocal):
            yield from item.names
        elif isinstance(item, ast.alias):
            yield (item.asname or item.name).partition(".")[0]
        elif isinstance(item, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and item.name:
            yield item.name
        elif isinstance(item, ast.MatchMapping) and item.rest:
            yield item.rest
        elif isinstance(item, (*_SCOPES, *_COMPREHENSIONS)) and item is not function:
            yield from (
                inner.id
                for inner in ast.walk(item)
                if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load)
            )
            if isinstance(item, Function | ast.ClassDef):
                yield item.name


class _TurnConditions(ast.NodeTransformer):
    """Turns `if a: X else: Y` into `if not a: Y else: X`, and `a is b` into `not a is not b`."""

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        if not node.orelse:
            return node
        return ast.If(ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body)

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        self.generic_visit(node)
        return ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        opposite = _OPPOSITES.get(type(node.ops[0]))
        if len(node.ops) > 1 or opposite is None:
            return node
        return ast.UnaryOp(ast.Not(), ast.Compare(node.left, [opposite()], node.comparators))


class _NameResults(ast.NodeTransformer):
    """Turns `return a` into `outcome_value = a; return outcome_value`."""

    def visit_Return(self, node: ast.Return) -> ast.stmt | list[ast.stmt]:
        if node.value is None:
            return node
        name = f"outcome{_SUFFIX}"
        return [
            ast.Assign([ast.Name(name, ast.Store())], node.value),
            ast.Return(ast.Name(name, ast.Load())),
        ]


class _SplitConditions(ast.NodeTransformer):
    """Splits `if a and b: X` into two nested conditions, and drops `else` after a branch that leaves the block."""

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        self.generic_visit(node)
        if node.orelse and isinstance(node.body[-1], _LEAVES):
            return [ast.If(node.test, node.body, []), *node.orelse]
        if node.orelse or not isinstance(node.test, ast.BoolOp):
            return node
        if not isinstance(node.test.op, ast.And):
            return node
        body: list[ast.stmt] = node.body
        for part in reversed(node.test.values):
            body = [ast.If(part, body, [])]
        return body


class _TurnLoops(ast.NodeTransformer):
    """Turns `while a: X` into `while True` with a `break` when `a` is false."""

    def visit_While(self, node: ast.While) -> ast.While:
        self.generic_visit(node)
        if node.orelse:
            return node
        leave = ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Break()], [])
        return ast.While(ast.Constant(True), [leave, *node.body], [])


class _SwapAssignments(ast.NodeTransformer):
    """Swaps two consecutive assignments of constants."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            body = vars(node).get(field)
            if isinstance(body, list):
                for index in range(0, len(body) - 1):
                    first, second = (_constant_target(item) for item in body[index : index + 2])
                    if first and second and first != second:
                        body[index : index + 2] = body[index + 1], body[index]
                        break
        return node


def _constant_target(node: ast.AST) -> str:
    """The name that a statement assigns a constant or an empty display to. Empty: it is no such statement."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return ""
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Name):
        return ""
    empty = isinstance(value, ast.List | ast.Tuple) and not value.elts
    empty = empty or (isinstance(value, ast.Dict) and not value.keys)
    return target.id if empty or isinstance(value, ast.Constant) else ""


def _transform(transformer: type[ast.NodeTransformer]) -> Callable[[Function], None]:
    def rewrite(function: Function) -> None:
        transformer().generic_visit(function)

    return rewrite


_REWRITERS: dict[str, Callable[[Function], None]] = {
    "renamed locals": _rename_locals,
    "turned conditions": _transform(_TurnConditions),
    "named results": _transform(_NameResults),
    "split conditions": _transform(_SplitConditions),
    "turned loops": _transform(_TurnLoops),
    "swapped assignments": _transform(_SwapAssignments),
}


def _respell(original: bytes, changed: Sequence[str]) -> bytes:
    """The text with integers of changed functions in hexadecimal, and their plain strings in other quotes."""
    text = original.decode()
    spans = [
        range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
        for name, node in walk_definitions(parse_python(original))
        if name in changed
    ]
    lines = io.StringIO(text).readlines()  # split as the tokenizer splits lines
    try:
        found = [
            token
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if any(token.start[0] in span for span in spans)
        ]
    except (tokenize.TokenError, SyntaxError):
        return original
    for token in reversed(found):
        row, start, end = token.start[0] - 1, token.start[1], token.end[1]
        if token.start[0] == token.end[0]:
            lines[row] = lines[row][:start] + _spell(token) + lines[row][end:]
    return "".join(lines).encode()


def _spell(token: tokenize.TokenInfo) -> str:
    word = token.string
    if token.type == tokenize.NUMBER and word.isdecimal():
        return hex(int(word))
    inside = word[1:-1]
    is_plain = token.type == tokenize.STRING and word[:1] == "'" and word[:3] != "'''"
    return f'"{inside}"' if is_plain and not set(inside) & {'"', "'", "\\"} else word
