"""A function in the tree of its module, and what rewrites of it share."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_OWN_FRAME = frozenset({"super", "locals", "vars", "dir", "eval", "exec", "globals", "__class__"})


class DoesNotFit(Exception):
    """A function that cannot be written this way."""


@dataclass
class Place:
    """A function in the tree of its module, ready to be changed."""

    tree: ast.Module
    path: str
    symbol: str

    def __post_init__(self) -> None:
        body, self.owner = self.tree.body, None
        *classes, self.name = self.symbol.split(".")
        for part in classes:
            found = [n for n in body if isinstance(n, ast.ClassDef) and n.name == part]
            require(bool(found))
            self.owner = found[-1]
            body = self.owner.body
        found = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == self.name]
        require(len(found) == 1)
        self.body, self.node = body, found[0]

    def replace(self, *statements: ast.stmt) -> None:
        """Other statements in place of the function."""
        at = self.body.index(self.node)
        self.body[at : at + 1] = statements

    def before_all(self, *statements: ast.stmt) -> None:
        """Statements at the head of the module, after its imports from the future."""
        self.tree.body[self._start() : self._start()] = statements

    def before_owner(self, *statements: ast.stmt) -> None:
        """Statements before the class or function in its module."""
        top = next(n for n in self.tree.body if self.node in ast.walk(n) or n is self.owner)
        at = self.tree.body.index(top)
        self.tree.body[at:at] = statements

    def _start(self) -> int:
        body, at = self.tree.body, 0
        while at < len(body) and (
            (isinstance(body[at], ast.Expr) and isinstance(body[at].value, ast.Constant))
            or (isinstance(body[at], ast.ImportFrom) and body[at].module == "__future__")
        ):
            at += 1
        return at

    @property
    def own(self) -> list[ast.AST]:
        """Nodes of the function's own scope."""
        return list(own_nodes(self.node.body))


def require(holds: object) -> None:
    if not holds:
        raise DoesNotFit


def own_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*SCOPES, *COMPREHENSIONS)):
            waiting += ast.iter_child_nodes(node)


def load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def parse(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def pass_on(function: ast.AST, arguments: ast.arguments) -> ast.Call:
    """The call of a function with all parameters of another."""
    plain = [load(item.arg) for item in (*arguments.posonlyargs, *arguments.args)]
    plain += [ast.Starred(load(arguments.vararg.arg), ast.Load())] if arguments.vararg else []
    named = [ast.keyword(item.arg, load(item.arg)) for item in arguments.kwonlyargs]
    named += [ast.keyword(None, load(arguments.kwarg.arg))] if arguments.kwarg else []
    return ast.Call(function, plain, named)


def parameters(node: ast.FunctionDef) -> list[str]:
    found = node.args
    all_of = [*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg]
    return [item.arg for item in all_of if item is not None]


def locals_of(node: ast.FunctionDef) -> set[str]:
    stored = {
        item.id
        for item in own_nodes(node.body)
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    }
    return stored | set(parameters(node))


def is_generator(node: ast.FunctionDef) -> bool:
    return any(isinstance(item, (ast.Yield, ast.YieldFrom)) for item in own_nodes(node.body))


def reads_frame(node: ast.AST) -> bool:
    return any(isinstance(item, ast.Name) and item.id in _OWN_FRAME for item in ast.walk(node))


def is_private_name(node: ast.AST) -> bool:
    names = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    return any(name.startswith("__") and not name.endswith("__") for name in names)


def plain_function(place: Place) -> None:
    """Requires a function without decorators that hands itself to nobody, who might show its `__name__`, and whose
    special names do not steer its class.
    """
    require(not place.node.decorator_list)
    nodes = [*ast.walk(place.node)]
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    require(
        not any(
            isinstance(it, ast.Name) and it.id == place.name for it in nodes if it not in called
        )
    )
    require(place.name not in ("__new__", "__init_subclass__", "__class_getitem__"))


def docstring_of(node: ast.FunctionDef) -> list[ast.stmt]:
    return node.body[:1] if ast.get_docstring(node) is not None else []
