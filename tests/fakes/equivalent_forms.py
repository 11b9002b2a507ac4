"""Other forms of a whole function: what its name is bound to, where its work is done."""

import ast
import builtins
import copy

from tests.fakes.rewriting import (
    COMPREHENSIONS,
    DoesNotFit,
    Place,
    assign,
    docstring_of,
    is_generator,
    is_private_name,
    load,
    locals_of,
    parse,
    pass_on,
    plain_function,
    reads_frame,
    require,
)


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
            if isinstance(c, COMPREHENSIONS)
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
