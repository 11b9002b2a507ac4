"""Ways to write a function otherwise that keep what its callers see: one file each, made from the original's
syntax tree. `rewrite_function`: by the name of the way, the changed files. A way that does not fit is left out.
"""

import ast
import builtins
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ostinato.infra.platform.syntax import parse_python

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
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
        if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
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
    """Requires a function without decorators whose special names do not steer its class."""
    require(not place.node.decorator_list)
    require(place.name not in ("__new__", "__init_subclass__", "__class_getitem__"))


def docstring_of(node: ast.FunctionDef) -> list[ast.stmt]:
    return node.body[:1] if ast.get_docstring(node) is not None else []


# each changes the tree of its place


def helper_assigned(place: Place) -> None:
    plain_function(place)
    place.node.name = (
        f"{place.name}_checked" if place.name.startswith("_") else f"_{place.name}_checked"
    )
    require(not (place.node.name.startswith("__") and place.owner))
    at = place.body.index(place.node)
    place.body.insert(at + 1, assign(place.name, load(place.node.name)))


def a_lambda(place: Place) -> None:
    plain_function(place)
    require(not reads_frame(place.node))
    inner = copy.deepcopy(place.node)
    inner.name = f"_whole_{place.name.strip('_')}"
    arguments = copy.deepcopy(place.node.args)
    for item in ast.walk(arguments):
        if isinstance(item, ast.arg):
            item.annotation = None
    arguments_of_inner = inner.args
    arguments_of_inner.defaults = copy.deepcopy(arguments.defaults)
    if place.owner is None:
        called: ast.expr = load(inner.name)
        call = pass_on(called, arguments)
    else:
        require(arguments.args or arguments.posonlyargs)
        call = pass_on(load("placeholder"), arguments)
        first = call.args.pop(0)
        call.func = ast.Attribute(first, inner.name, ast.Load())
    place.replace(inner, assign(place.name, ast.Lambda(arguments, call)))


def a_lambda_alone(place: Place) -> None:
    plain_function(place)
    body = place.node.body[len(docstring_of(place.node)) :]
    require(len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None)
    require(not reads_frame(place.node))
    arguments = copy.deepcopy(place.node.args)
    for item in ast.walk(arguments):
        if isinstance(item, ast.arg):
            item.annotation = None
    place.replace(assign(place.name, ast.Lambda(arguments, body[0].value)))


def decorated(place: Place, wraps: str = "@_functools.wraps(function)\n    ") -> None:
    plain_function(place)
    helper = f"""
import functools as _functools
def _passing(function):
    {wraps}def inner(*plain, **named):
        return function(*plain, **named)
    return inner
"""
    place.before_all(*parse(helper))
    place.node.decorator_list = [load("_passing")]


def decorated_without_wraps(place: Place) -> None:
    decorated(place, "")


def nested(place: Place) -> None:
    require(not is_generator(place.node) or place.node.args is not None)
    require(not any(isinstance(i, ast.Nonlocal) for i in ast.walk(place.node)))
    require(not reads_frame(place.node) or "super" in ast.unparse(place.node))
    require("locals(" not in ast.unparse(place.node))
    doc = docstring_of(place.node)
    arguments = copy.deepcopy(place.node.args)
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for item in ast.walk(arguments):
        if isinstance(item, ast.arg):
            item.annotation = None
    body = place.node.body[len(doc) :]
    require(body)
    inner = ast.FunctionDef("inner", arguments, body, [], None)
    place.node.body = [*doc, inner, ast.Return(pass_on(load("inner"), arguments))]


class _Statements(ast.NodeTransformer):
    """Rewrites statements of the function's own scope; counts what it changed."""

    def __init__(self) -> None:
        self.num_changed = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    visit_ClassDef = visit_Lambda = visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def rewrite(self, place: Place) -> None:
        place.node.body = [
            new
            for old in place.node.body
            for new in (lambda found: found if isinstance(found, list) else [found])(
                self.visit(old)
            )
        ]
        require(self.num_changed)


class _UnrollComprehensions(_Statements):
    def _loops(self, made: ast.ListComp, name: str) -> list[ast.stmt]:
        self.num_changed += 1
        append = ast.Call(ast.Attribute(load(name), "append", ast.Load()), [made.elt], [])
        body: list[ast.stmt] = [ast.Expr(append)]
        for part in reversed(made.generators):
            for test in reversed(part.ifs):
                body = [ast.If(test, body, [])]
            body = [ast.For(part.target, part.iter, body, [])]
        return [assign(name, ast.List([], ast.Load())), *body]

    def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.stmt]:
        if isinstance(node.value, ast.ListComp) and not any(
            g.is_async for g in node.value.generators
        ):
            return [*self._loops(node.value, "found_items"), ast.Return(load("found_items"))]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        if isinstance(node.value, ast.ListComp) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            used = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            if name not in used and len(node.targets) == 1:
                return self._loops(node.value, name)
        return node


def comprehension_to_loop(place: Place) -> None:
    made = [
        n.id
        for c in place.own
        if isinstance(c, ast.ListComp)
        for g in c.generators
        for n in ast.walk(g.target)
        if isinstance(n, ast.Name)
    ]
    require(not set(made) & locals_of(place.node))
    require(
        not any(
            isinstance(i, ast.Lambda)
            for c in place.own
            if isinstance(c, ast.ListComp)
            for i in ast.walk(c)
        )
    )
    _UnrollComprehensions().rewrite(place)


def loop_to_comprehension(place: Place) -> None:
    for body in bodies(place.node):
        for at in range(len(body) - 1):
            first, loop = body[at], body[at + 1]
            if not (isinstance(first, ast.Assign) and isinstance(loop, ast.For)):
                continue
            if not (isinstance(first.value, ast.List) and not first.value.elts):
                continue
            if loop.orelse or len(loop.body) != 1 or not isinstance(first.targets[0], ast.Name):
                continue
            name, inner = first.targets[0].id, loop.body[0]
            tests = []
            if isinstance(inner, ast.If) and not inner.orelse and len(inner.body) == 1:
                tests, inner = [inner.test], inner.body[0]
            text = ast.unparse(inner)
            if not text.startswith(f"{name}.append(") or not isinstance(inner, ast.Expr):
                continue
            element = inner.value.args[0]  # type: ignore[attr-defined]
            targets = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
            parts = [element, loop.iter, *tests]
            if any(isinstance(n, ast.Name) and n.id == name for p in parts for n in ast.walk(p)):
                continue
            if any(
                isinstance(n, (ast.Yield, ast.Await, ast.NamedExpr))
                for p in parts
                for n in ast.walk(p)
            ):
                continue
            uses = [n for n in ast.walk(place.node) if isinstance(n, ast.Name) and n.id in targets]
            if len(uses) > sum(n in list(ast.walk(loop)) for n in uses):
                continue
            made = ast.ListComp(element, [ast.comprehension(loop.target, loop.iter, tests, 0)])
            body[at : at + 2] = [assign(name, made)]
            return
    raise DoesNotFit


def bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for item in [node, *own_nodes(node.body)]:  # type: ignore[attr-defined]
        if isinstance(item, (*_SCOPES,)) and item is not node:
            continue
        for field in ("body", "orelse", "finalbody"):
            found = getattr(item, field, None)
            if isinstance(found, list) and found and isinstance(found[0], ast.stmt):
                yield found


def nest_what_follows(place: Place) -> None:
    """`if a: return x; REST` as `if a: return x; else: REST`."""
    changed = False
    for body in list(bodies(place.node)):
        for at in range(len(body) - 1):
            one = body[at]
            if (
                isinstance(one, ast.If)
                and not one.orelse
                and isinstance(one.body[-1], (ast.Return, ast.Raise))
            ):
                one.orelse, changed = body[at + 1 :], True
                del body[at + 1 :]
                break
    require(changed)


def early_return(place: Place) -> None:
    """`if a: ..return; else: REST` as an early return."""
    changed = False
    for body in list(bodies(place.node)):
        one = body[-1]
        if (
            isinstance(one, ast.If)
            and one.orelse
            and isinstance(one.body[-1], (ast.Return, ast.Raise))
        ):
            rest, one.orelse, changed = one.orelse, [], True
            body += rest
    require(changed)


def renamed_locals(place: Place) -> None:
    node = place.node
    taken = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
    for item in ast.walk(node):
        if isinstance(item, (ast.Global, ast.Nonlocal)):
            taken |= set(item.names)
        elif isinstance(item, ast.alias):
            taken.add((item.asname or item.name).partition(".")[0])
        elif isinstance(item, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and item.name:
            taken.add(item.name)
        elif isinstance(item, (*_SCOPES, *_COMPREHENSIONS)) and item is not node:
            taken |= {
                n.id
                for n in ast.walk(item)
                if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
            }
            taken |= {item.name} if isinstance(item, (ast.FunctionDef, ast.ClassDef)) else set()
    names = locals_of(node) - taken
    require(names and not reads_frame(node))
    for statement in node.body:
        for item in ast.walk(statement):
            if isinstance(item, ast.Name) and item.id in names:
                item.id = f"its_{item.id}"


def reordered_branches(place: Place) -> None:
    """Two branches that ask the same name for different constants, in the other order."""

    def asked(test: ast.expr) -> tuple[str, object] | None:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            right = test.comparators[0]
            if isinstance(test.left, ast.Name) and isinstance(right, ast.Constant):
                if type(right.value) in (int, str):
                    return test.left.id, right.value
        return None

    for item in place.own:
        if (
            isinstance(item, ast.If)
            and len(item.orelse) == 1
            and isinstance(item.orelse[0], ast.If)
        ):
            one, two = asked(item.test), asked(item.orelse[0].test)
            if one and two and one[0] == two[0] and one[1] != two[1]:
                other = item.orelse[0]
                item.test, other.test = other.test, item.test
                item.body, other.body = other.body, item.body
                return
    raise DoesNotFit


def a_partial(place: Place) -> None:
    plain_function(place)
    base = f"_base_of_{place.name.strip('_')}"
    place.node.name = base
    at = place.body.index(place.node)
    kind = "partialmethod" if place.owner else "partial"
    require(
        place.name
        not in ("__init__", "__eq__", "__hash__", "__iter__", "__call__", "__enter__", "__exit__")
    )
    place.body[at + 1 : at + 1] = parse(
        f"import functools as _tools\n{place.name} = _tools.{kind}({base})"
    )


def inherited(place: Place) -> None:
    require(place.owner is not None and place.symbol.count(".") == 1)
    require(not reads_frame(place.node) and not is_private_name(place.node))
    require(place.name not in ("__eq__", "__hash__", "__new__", "__init_subclass__", "__slots__"))
    names = {n.name for n in place.owner.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    names |= {
        t.id
        for n in place.owner.body
        if isinstance(n, ast.Assign)
        for t in n.targets
        if isinstance(t, ast.Name)
    }
    outside = [
        *place.node.decorator_list,
        *place.node.args.defaults,
        *filter(None, place.node.args.kw_defaults),
    ]
    used = {n.id for part in outside for n in ast.walk(part) if isinstance(n, ast.Name)}
    others = {
        n.id
        for item in place.owner.body
        if item is not place.node
        for n in ast.walk(item)
        if isinstance(n, ast.Name)
    }
    require(not used & names and place.name not in others)
    bases = [ast.unparse(base) for base in place.owner.bases]
    require(not any(b.endswith(("NamedTuple", "TypedDict", "Protocol", "Enum")) for b in bases))
    place.body.remove(place.node)
    place.owner.body = place.owner.body or [ast.Pass()]
    slots: list[ast.stmt] = [assign("__slots__", ast.Tuple([], ast.Load()))]
    mixin = ast.ClassDef(f"_{place.owner.name}Parts", [], [], [*slots, place.node], [])
    at = place.tree.body.index(place.owner)
    place.tree.body.insert(at, mixin)
    place.owner.bases.insert(0, load(mixin.name))


def built_by_call(place: Place) -> None:
    """`property(f)`, `staticmethod(f)` and the like called, not as a decorator."""
    require(place.owner is not None and len(place.node.decorator_list) == 1)
    (mark,) = place.node.decorator_list
    require(isinstance(mark, ast.Name) and mark.id in ("property", "staticmethod", "classmethod"))
    place.node.decorator_list = []
    place.node.name = f"_make_{place.name.strip('_')}"
    at = place.body.index(place.node)
    place.body.insert(at + 1, assign(place.name, ast.Call(mark, [load(place.node.name)], [])))


class _UnrollDelegation(_Statements):
    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.YieldFrom):
            self.num_changed += 1
            body: list[ast.stmt] = [ast.Expr(ast.Yield(load("item_of_it")))]
            return ast.For(ast.Name("item_of_it", ast.Store()), node.value.value, body, [])
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        if len(node.body) == 1 and not node.orelse and isinstance(node.body[0], ast.Expr):
            made = node.body[0].value
            if isinstance(made, ast.Yield) and isinstance(made.value, ast.Name):
                if isinstance(node.target, ast.Name) and node.target.id == made.value.id:
                    self.num_changed += 1
                    return ast.Expr(ast.YieldFrom(node.iter))
        return self.generic_visit(node)


def yield_from_or_loop(place: Place) -> None:
    _UnrollDelegation().rewrite(place)


def generator_expression(place: Place) -> None:
    """A generator of one loop as an expression, or a list that a function takes in as a generator."""
    body = place.node.body[len(docstring_of(place.node)) :]
    if len(body) == 1 and isinstance(body[0], ast.For) and len(body[0].body) == 1:
        loop, inner = body[0], body[0].body[0]
        tests = []
        if isinstance(inner, ast.If) and not inner.orelse and len(inner.body) == 1:
            tests, inner = [inner.test], inner.body[0]
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Yield) and inner.value.value:
            made = ast.comprehension(loop.target, loop.iter, tests, 0)
            place.node.body = [
                *docstring_of(place.node),
                ast.Return(ast.GeneratorExp(inner.value.value, [made])),
            ]
            return
    taking = (
        "sum",
        "any",
        "all",
        "sorted",
        "set",
        "tuple",
        "list",
        "max",
        "min",
        "frozenset",
        "dict",
    )
    for item in place.own:
        if (
            isinstance(item, ast.Call)
            and isinstance(item.func, ast.Name)
            and item.func.id in taking
            and len(item.args) == 1
        ):
            held = item.args[0]
            if isinstance(held, ast.ListComp):
                item.args[0] = ast.GeneratorExp(held.elt, held.generators)
                return
            if isinstance(held, ast.GeneratorExp) and item.func.id not in ("any", "all"):
                item.args[0] = ast.ListComp(held.elt, held.generators)
                return
    raise DoesNotFit


class _NameReturns(_Statements):
    def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.stmt]:
        if node.value is None:
            return node
        self.num_changed += 1
        return [assign("its_result", node.value), ast.Return(load("its_result"))]


def named_result(place: Place) -> None:
    _NameReturns().rewrite(place)


class _Morgan(ast.NodeTransformer):
    def __init__(self) -> None:
        self.num_changed = 0

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.test, ast.BoolOp):
            self.num_changed += 1
            other = ast.Or() if isinstance(node.test.op, ast.And) else ast.And()
            parts: list[ast.expr] = [ast.UnaryOp(ast.Not(), value) for value in node.test.values]
            node.test = ast.UnaryOp(ast.Not(), ast.BoolOp(other, parts))
        return node


def de_morgan(place: Place) -> None:
    transformer = _Morgan()
    transformer.generic_visit(place.node)
    require(transformer.num_changed)


class _Ternaries(_Statements):
    def _branch(self, value: ast.IfExp, make: Callable[[ast.expr], ast.stmt]) -> ast.stmt:
        self.num_changed += 1
        return ast.If(value.test, [make(value.body)], [make(value.orelse)])

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if isinstance(node.value, ast.IfExp):
            return self._branch(node.value, ast.Return)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if isinstance(node.value, ast.IfExp) and isinstance(node.targets[0], ast.Name):
            return self._branch(node.value, lambda value: ast.Assign(node.targets, value))
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if len(node.body) == 1 == len(node.orelse):
            one, two = node.body[0], node.orelse[0]
            if (
                isinstance(one, ast.Return)
                and isinstance(two, ast.Return)
                and one.value
                and two.value
            ):
                self.num_changed += 1
                return ast.Return(ast.IfExp(node.test, one.value, two.value))
        return self.generic_visit(node)


def ternary_or_if(place: Place) -> None:
    _Ternaries().rewrite(place)


class _Loops(_Statements):
    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if node.orelse or node.type_comment:
            return node
        self.num_changed += 1
        name = f"steps_{self.num_changed}"
        step = ast.Assign([node.target], ast.Call(load("next"), [load(name)], []))
        ends = ast.ExceptHandler(load("StopIteration"), None, [ast.Break()])
        head = ast.Try([assign("taken_item", step.value)], [ends], [], [])
        body = [head, ast.Assign([node.target], load("taken_item")), *node.body]
        made = ast.Call(load("iter"), [node.iter], [])
        return [assign(name, made), ast.While(ast.Constant(True), body, [])]

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        if node.orelse or isinstance(node.test, ast.Constant):
            return node
        self.num_changed += 1
        for_ever = ast.Call(load("iter"), [load("int"), ast.Constant(1)], [])
        leave = ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Break()], [])
        return ast.For(ast.Name("its_round", ast.Store()), for_ever, [leave, *node.body], [])


def while_or_for(place: Place) -> None:
    _Loops().rewrite(place)


def extracted_constant(place: Place) -> None:
    names: list[ast.stmt] = []

    class Extract(_Statements):
        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            if type(node.value) not in (int, str, float) or len(names) > 4:
                return node
            self.num_changed += 1
            name = f"_CONSTANT_{len(names)}_OF_{place.name.strip('_').upper()}"
            names.append(assign(name, ast.Constant(node.value)))
            return load(name)

        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
            return node

        def visit_match_case(self, node: ast.match_case) -> ast.AST:
            return node

    doc = docstring_of(place.node)
    place.node.body = place.node.body[len(doc) :]
    require(place.node.body)
    Extract().rewrite(place)
    place.node.body = [*doc, *place.node.body]
    place.before_all(*names)


def extracted_function(place: Place) -> None:
    """What is returned is computed by a function of its own."""
    returns = [
        n
        for n in place.own
        if isinstance(n, ast.Return)
        and isinstance(
            n.value,
            (
                ast.Call,
                ast.BinOp,
                ast.Compare,
                ast.Subscript,
                ast.Tuple,
                ast.List,
                ast.IfExp,
                ast.BoolOp,
                ast.JoinedStr,
            ),
        )
    ]
    known = locals_of(place.node) - {
        n for i in place.own if isinstance(i, ast.Global) for n in i.names
    }
    for item in returns:
        value = item.value
        bad = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.Lambda)
        if (
            reads_frame(value)
            or is_private_name(value)
            or any(isinstance(n, bad) for n in ast.walk(value))
        ):
            continue
        inside = {
            n.id
            for c in ast.walk(value)
            if isinstance(c, _COMPREHENSIONS)
            for g in c.generators
            for n in ast.walk(g.target)
            if isinstance(n, ast.Name)
        }
        if inside & known:
            continue
        used = sorted({n.id for n in ast.walk(value) if isinstance(n, ast.Name)} & known)
        inner_names = {n.name for n in place.own if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        inner_names |= {
            (a.asname or a.name).partition(".")[0]
            for n in place.own
            if isinstance(n, (ast.Import, ast.ImportFrom))
            for a in n.names
        }
        inner_names |= {n.name for n in place.own if isinstance(n, ast.ExceptHandler) and n.name}
        if {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} & inner_names:
            continue
        name = f"_result_of_{place.name.strip('_')}"
        made = parse(f"def {name}({', '.join(used)}):\n    return 0")[0]
        made.body[0].value = value  # type: ignore[attr-defined]
        item.value = ast.Call(load(name), [load(n) for n in used], [])
        place.before_owner(made)
        return
    raise DoesNotFit


def moved(place: Place) -> tuple[str, str]:
    """The work in a new module; returns its path and text."""
    node = place.node
    plain_function(place)
    require(not reads_frame(node) and not is_private_name(node))
    require(not any(isinstance(i, ast.Global) for i in ast.walk(node)))
    folder, _, file = place.path.rpartition("/")
    require(folder and file != "__init__.py" and place.symbol.count(".") <= 1)
    name = f"_moved_{place.name.strip('_')}"
    home = f"{folder.replace('/', '.')}.{file.removesuffix('.py')}"
    inner = copy.deepcopy(node)
    inner.name, inner.returns = name, None
    inner.args.defaults, inner.args.kw_defaults = [], [None] * len(inner.args.kwonlyargs)
    for item in ast.walk(inner.args):
        if isinstance(item, ast.arg):
            item.annotation = None
    module_names = {
        n.id
        for n in ast.walk(place.tree)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    module_names |= {
        n.name for n in place.tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))
    }
    for item in ast.walk(place.tree):
        if isinstance(item, (ast.Import, ast.ImportFrom)):
            module_names |= {(a.asname or a.name).partition(".")[0] for a in item.names}
    bound = {
        n.id for n in ast.walk(inner) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
    }
    bound |= {n.arg for n in ast.walk(inner) if isinstance(n, ast.arg)}
    bound |= {
        n.name
        for n in ast.walk(inner)
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n is not inner
    }
    bound |= {n.name for n in ast.walk(inner) if isinstance(n, ast.ExceptHandler) and n.name}
    for n in ast.walk(inner):
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            require(not (isinstance(n, ast.ImportFrom) and n.level))
            bound |= {(a.asname or a.name).partition(".")[0] for a in n.names}

    class Qualify(ast.NodeTransformer):
        def visit_Name(self, item: ast.Name) -> ast.AST:
            is_global = item.id not in bound and (
                item.id in module_names or not hasattr(builtins, item.id)
            )
            return ast.Attribute(load("_home"), item.id, ast.Load()) if is_global else item

        def visit_AnnAssign(self, item: ast.AnnAssign) -> ast.AST:
            return ast.Assign([item.target], self.visit(item.value)) if item.value else ast.Pass()

    inner.body = [Qualify().visit(statement) for statement in inner.body]
    content = [*parse(f"import {home} as _home"), inner]
    place.node.body = [*docstring_of(node), ast.Return(pass_on(load(name), node.args))]
    place.before_all(*parse(f"from {folder.replace('/', '.')}.{name}_parts import {name}"))
    text = ast.unparse(ast.fix_missing_locations(ast.Module(content, [])))
    return f"{folder}/{name}_parts.py", text


class _Match(_Statements):
    def visit_If(self, node: ast.If) -> ast.AST:
        test = node.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            right = test.comparators[0]
            if isinstance(right, ast.Constant) and type(right.value) in (int, str):
                self.num_changed += 1
                cases = [ast.match_case(ast.MatchValue(right), None, node.body)]
                if node.orelse:
                    cases.append(ast.match_case(ast.MatchAs(None, None), None, node.orelse))
                return ast.Match(test.left, cases)
        return self.generic_visit(node)


def match_for_if(place: Place) -> None:
    _Match().rewrite(place)


def tried(place: Place) -> None:
    doc = docstring_of(place.node)
    body = place.node.body[len(doc) :]
    require(body)
    place.node.body = [*doc, ast.Try(body, [], [], [ast.Pass()])]


def annotated(place: Place) -> None:
    require(not docstring_of(place.node))
    place.node.body.insert(0, ast.Expr(ast.Constant("Told in words.")))
    place.node.returns = ast.Constant("object")


def callable_object(place: Place) -> None:
    plain_function(place)
    require(place.owner is None)
    place.node.name = "__call__"
    place.node.args.args.insert(0, ast.arg("_itself"))
    require(not place.node.args.posonlyargs)
    kind = ast.ClassDef(f"_Callable{place.name.strip('_').title()}", [], [], [place.node], [])
    place.replace(kind, assign(place.name, ast.Call(load(kind.name), [], [])))


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
}  # fmt: skip


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
