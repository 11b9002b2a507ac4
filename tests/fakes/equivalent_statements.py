"""Other statements inside of a function."""

import ast
from collections.abc import Callable, Iterator

from tests.fakes.rewriting import (
    COMPREHENSIONS,
    SCOPES,
    DoesNotFit,
    Place,
    assign,
    docstring_of,
    load,
    locals_of,
    own_nodes,
    reads_frame,
    require,
)


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
        if isinstance(item, (*SCOPES,)) and item is not node:
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
    for body in bodies(place.node):
        one = body[-1]
        if (
            isinstance(one, ast.If)
            and one.orelse
            and isinstance(one.body[-1], (ast.Return, ast.Raise))
        ):
            rest, one.orelse = one.orelse, []
            body += rest
            return
    raise DoesNotFit


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
        elif isinstance(item, (*SCOPES, *COMPREHENSIONS)) and item is not node:
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
            is_named = isinstance(test.left, ast.Name) and isinstance(right, ast.Constant)
            if is_named and type(right.value) in (int, str):
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
            is_named = isinstance(made, ast.Yield) and isinstance(made.value, ast.Name)
            is_name = isinstance(node.target, ast.Name)
            if is_named and is_name and node.target.id == made.value.id:
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
