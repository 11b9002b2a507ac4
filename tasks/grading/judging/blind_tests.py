"""Tests without their expectations: the box records what assertions compare, and judges nothing.

`take_expectations_out` returns the text of a test file in which each assertion only shows its operands and
the result of comparing them, without operands that are literals. With a random generator, literals of the
chosen tests are changed too, and some literals of the module-level code that they use, so that remains of
an expectation (a parameter, a variable) become wrong as well.
"""

import ast
import random
from collections.abc import Collection
from typing import Any

from ostinato.infra.platform.syntax import parse_python
from ostinato.infra.sandbox.inside.sources import is_test_name

_RAISING = frozenset(
    {"raises", "assertRaises", "assertRaisesRegex", "warns", "assertWarns", "assertWarnsRegex"}
)
# unittest's names for the operators of `assert`
_COMPARING: dict[str, type[ast.cmpop]] = {
    "assertEqual": ast.Eq, "assertNotEqual": ast.NotEq, "assertLess": ast.Lt,
    "assertLessEqual": ast.LtE, "assertGreater": ast.Gt, "assertGreaterEqual": ast.GtE,
    "assertIn": ast.In, "assertNotIn": ast.NotIn,
}  # fmt: skip
# assertions of unittest.mock: their arguments are the expectation, so the calls of the fake are shown instead
_CALLS_OF_FAKE = frozenset(
    {f"assert_{name}" for name in (
        "called", "called_once", "called_with", "called_once_with", "any_call", "has_calls", "not_called",
        "awaited", "awaited_once", "awaited_with", "awaited_once_with", "any_await", "has_awaits", "not_awaited",
    )}
)  # fmt: skip
_COMPARISONS = frozenset(
    {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__"}
)
_CHANGED_SHARE = 0.35
_CHANGED_IN_CALLS = (0, 1, 3)
_SPARED_CALLS = frozenset({"parametrize", "usefixtures", "getattr", "hasattr", "importorskip"})
_MAX_INTEGER = 10_000


def judges_comparisons(symbol: str) -> bool:
    """Whether a function implements a comparison. Its tests then expect the answer, not the literal operand."""
    return symbol.rpartition(".")[2] in _COMPARISONS


def take_expectations_out(
    source: bytes,
    tests: frozenset[str] | None,
    rng: random.Random | None = None,
    *,
    with_literals: bool = False,
    own_assertions: Collection[str] = (),
    rules: str = "",
) -> bytes:
    """The file with only the named tests (`function`, `Class.method`, or `method` of any class; None: all
    tests of the file), whose assertions show their operands instead. `with_literals`: comparisons with a
    literal are shown too, so the literal stays in the file. `own_assertions`: names of assertions that the
    tests define. They run as well, since they may call the code under test, unless an argument is a call.
    `rules`: the repository's collection rules. Arguments go through `__vary__`, which lets a copy change
    them at run time wherever they come from (data files, other modules).
    """
    tree = parse_python(source.decode())
    if tests is not None:
        tree.body = list(_keep_tests(tree.body, tests, "", rules))
    chosen = _find_tests(tree.body, tests or frozenset(), "")
    if rng is not None:
        inputs = _find_inputs(tree.body, chosen)
        for node in chosen:
            _ChangedLiterals(rng).visit(node)
        drawn = _draw_literals(inputs, rng)
        for node in inputs:
            _ChangedLiterals(rng, drawn).visit(node)
    tree = _VariedArguments(chosen).visit(tree)
    tree = _Blind(with_literals, own_assertions).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree)).encode()


def find_inherited(source: bytes, tests: frozenset[str]) -> frozenset[str]:
    """Names of the tests that the file does not define itself but inherits from a base class."""
    tree = parse_python(source.decode())
    found = {test for test in tests if _find_tests(tree.body, frozenset({test}), "")}
    return frozenset(test.rpartition(".")[2] for test in tests - found)


def _keep_tests(
    body: list[ast.stmt], tests: frozenset[str], prefix: str, rules: str
) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_kept = prefix + node.name in tests or (prefix and node.name in tests)
            if is_test_name(node.name, rules) and not is_kept and not _is_fixture(node):
                continue
        elif isinstance(node, ast.ClassDef):
            inner = _keep_tests(node.body, tests, f"{prefix}{node.name}.", rules)
            node.body = inner or [ast.Pass()]
        kept.append(node)
    return kept


def _find_tests(body: list[ast.stmt], tests: frozenset[str], prefix: str) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_found = prefix + node.name in tests or (prefix and node.name in tests)
            found += [node] if is_found else []
        elif isinstance(node, ast.ClassDef):
            found += _find_tests(node.body, tests, f"{prefix}{node.name}.")
    return found


def _find_inputs(body: list[ast.stmt], tests: list[ast.stmt]) -> list[ast.stmt]:
    """Statements outside the tests that give them values: assignments to names that they use, fixtures
    that they request, and the other statements of their classes.
    """
    inputs: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.ClassDef) and any(item in tests for item in ast.walk(node)):
            inputs += [item for item in node.body if item not in tests]
    waiting = [*tests, *inputs]
    while waiting:
        names = _names_in(waiting.pop())
        found = [
            node for node in body if node not in inputs and not names.isdisjoint(_defined(node))
        ]
        inputs += found
        waiting += found
    return inputs


def _names_in(node: ast.stmt) -> set[str]:
    names = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    return names | {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}


def _defined(node: ast.stmt) -> set[str]:
    """Names that an assignment or a fixture defines for tests."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name} if _is_fixture(node) else set()
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        held = [item for target in targets for item in ast.walk(target)]
        return {item.id for item in held if isinstance(item, ast.Name)}
    return set()


def _is_fixture(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a fixture. A function marked with `usefixtures` is a test."""
    marks = (item.func if isinstance(item, ast.Call) else item for item in node.decorator_list)
    return any(ast.unparse(mark).endswith("fixture") for mark in marks)


def _draw_literals(inputs: list[ast.stmt], rng: random.Random) -> list[ast.AST]:
    """Literals to change outside the tests of a copy, at least one. Few of them are in calls, because an
    impossible argument (a date) breaks the import of the whole copy.
    """
    parts = [part for node in inputs for part in ast.walk(node)]
    calls = [part for part in parts if isinstance(part, ast.Call)]
    in_calls = {id(part) for call in calls for part in ast.walk(call)}
    literals = [
        part
        for part in parts
        if isinstance(part, ast.Constant) and not isinstance(part.value, (bool, type(None)))
    ]
    drawn = [
        part for part in literals if id(part) not in in_calls and rng.random() < _CHANGED_SHARE
    ]
    risky = [part for part in literals if id(part) in in_calls]
    drawn += rng.sample(risky, min(len(risky), rng.choice(_CHANGED_IN_CALLS)))
    return [*drawn] or [*rng.sample(literals, min(len(literals), 1))]


class _Blind(ast.NodeTransformer):
    """Turns assertions into calls that show their operands."""

    def __init__(self, with_literals: bool, own_assertions: Collection[str]) -> None:
        self._with_literals = with_literals
        self._own = own_assertions

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return _show(_operands(node.test, self._with_literals))

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list[ast.stmt]:
        call, name = node.value, _called_name(node.value)
        if not isinstance(call, ast.Call):
            return node
        if name in _CALLS_OF_FAKE and isinstance(call.func, ast.Attribute):
            return _show([ast.Attribute(call.func.value, "mock_calls", ast.Load())])
        if name.startswith("assert") and name not in _RAISING:
            shown = _show(_compared(name, call.args, self._with_literals))
            parts = (part for argument in call.args for part in ast.walk(argument))
            has_call = any(isinstance(part, ast.Call) for part in parts)
            return [shown, node] if name in self._own and not has_call else shown
        if name in _RAISING and len(call.args) > 1:
            keywords = [item for item in call.keywords if item.arg != "match"]
            body = ast.Expr(ast.Call(call.args[1], call.args[2:], keywords))
            return ast.With(items=[ast.withitem(_call("__catch__", []))], body=[body])
        return node

    def visit_With(self, node: ast.With) -> ast.stmt:
        self.generic_visit(node)
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _called_name(call) in _RAISING:
                wants_text = len(call.args) + len(call.keywords) > 1
                item.context_expr = _call("__catch__", [ast.Constant(wants_text)])
        return node


class _ChangedLiterals(ast.NodeTransformer):
    """Changes some literals of a test to others of their type. Names given as text stay.

    `drawn`: the literals to change. None: each is drawn when it is visited.
    """

    def __init__(self, rng: random.Random, drawn: list[ast.AST] | None = None) -> None:
        self._rng = rng
        self._drawn = None if drawn is None else frozenset(map(id, drawn))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _called_name(node) in _SPARED_CALLS:
            node.args[1:] = [self.visit(argument) for argument in node.args[1:]]
            return node
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_changed = (
            self._rng.random() < _CHANGED_SHARE if self._drawn is None else id(node) in self._drawn
        )
        if not is_changed:
            return node
        return ast.copy_location(ast.Constant(change_value(node.value, self._rng)), node)


class _VariedArguments(ast.NodeTransformer):
    """Turns arguments that are names into `__vary__(NAME)`, and outside of tests literals as well.
    Expectations and fixtures stay.
    """

    def __init__(self, tests: list[ast.stmt]) -> None:
        self._tests = tests
        self._varied: tuple[type[ast.expr], ...] = (ast.Name, ast.Constant)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if _is_fixture(node) or node.name.lower().startswith(("setup", "teardown")):
            return node
        outer = self._varied
        if node in self._tests:  # literals of tests are changed in the text
            self._varied = (ast.Name,)
        self.generic_visit(node)
        self._varied = outer
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = _called_name(node)
        if name not in _SPARED_CALLS | _RAISING and not name.startswith("assert"):
            node.args = [self._vary(argument) for argument in node.args]
            for keyword in node.keywords:
                keyword.value = self._vary(keyword.value) if keyword.arg else keyword.value
        return node

    def _vary(self, argument: ast.expr) -> ast.expr:
        return _call("__vary__", [argument]) if isinstance(argument, self._varied) else argument


def change_value(value: Any, rng: random.Random) -> Any:
    """Another value of the same type, or the same value if there is no near one."""
    match value:
        case bool():
            return value if rng.random() < 0.8 else not value
        case int() if abs(value) < _MAX_INTEGER:
            return value + rng.choice((-2, -1, 1, 2, 3, 7))
        case int():
            return value + rng.randrange(1, _MAX_INTEGER)
        case float():
            return value + rng.choice((-1.5, -0.25, 0.125, 0.5, 2.0))
        case str() if value:
            return _change_text(value, rng)
        case bytes() if value:
            return _change_text(value.decode("latin-1"), rng).encode("latin-1", "replace")
        case _:
            return value


def _change_text(text: str, rng: random.Random) -> str:
    position = rng.randrange(len(text))
    letter = text[position]
    if letter.isdigit():
        return text[:position] + rng.choice("0123456789") + text[position + 1 :]
    kind = rng.randrange(4)
    if kind == 0:
        return text[:position] + letter.swapcase() + text[position + 1 :]
    if kind == 1:
        return text[:position] + letter + text[position:]
    if kind == 2:
        other = rng.choice(text)
        return text[:position] + other + text[position + 1 :]
    return text + " " + text if len(text) < 40 else text[:position] + text[position + 1 :]


def _operands(test: ast.expr, with_literals: bool) -> list[ast.expr]:
    if isinstance(test, ast.Compare):
        if len(test.ops) == 1:
            return _compare(test.left, test.ops[0], test.comparators[0], with_literals)
        return [test.left, *test.comparators]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _operands(test.operand, with_literals)
    if isinstance(test, ast.BoolOp):
        return [operand for value in test.values for operand in _operands(value, with_literals)]
    return [] if _is_literal(test) else [_with_truth(test)]


def _compared(name: str, arguments: list[ast.expr], with_literals: bool) -> list[ast.expr]:
    """Arguments of an assertion of unittest, with the result of its comparison."""
    if any(isinstance(argument, ast.Starred) for argument in arguments):
        return arguments
    if name in _COMPARING and len(arguments) > 1:
        left, right, *others = arguments
        return [*_compare(left, _COMPARING[name](), right, with_literals), *others]
    if name in ("assertTrue", "assertFalse") and arguments and not _is_literal(arguments[0]):
        return [_with_truth(arguments[0]), *arguments[1:]]
    return arguments


def _compare(
    left: ast.expr, operator: ast.cmpop, right: ast.expr, with_literals: bool
) -> list[ast.expr]:
    """Both operands and the answer, each computed once. No answer with a literal, unless `with_literals`."""
    is_shown = [not _is_literal(operand) for operand in (left, right)]
    if not any(is_shown) or not (all(is_shown) or with_literals):
        return [left, right]
    one, two = (ast.Name(name, ast.Load()) for name in ("one", "two"))
    answer = ast.Compare(ast.Name("one", ast.Load()), [operator], [ast.Name("two", ast.Load())])
    return [_spread(["one", "two"], [one, two, answer], [left, right])]


def _with_truth(operand: ast.expr) -> ast.expr:
    """An operand and its truth value."""
    twice = ast.Name("one", ast.Load())
    for _ in range(2):
        twice = ast.UnaryOp(ast.Not(), twice)
    return _spread(["one"], [ast.Name("one", ast.Load()), twice], [operand])


def _spread(names: list[str], shown: list[ast.expr], operands: list[ast.expr]) -> ast.expr:
    """`*(lambda NAMES: (SHOWN))(OPERANDS)`."""
    arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
    function = ast.Lambda(arguments, ast.Tuple(shown, ast.Load()))
    values = [_listed(operand) for operand in operands]
    return ast.Starred(ast.Call(function, values, []), ast.Load())


def _show(operands: list[ast.expr]) -> ast.stmt:
    shown = [_listed(operand) for operand in operands if not _is_literal(operand)]
    return ast.Expr(_call("__observe__", shown)) if shown else ast.Pass()


def _listed(operand: ast.expr) -> ast.expr:
    """The operand, with a generator expression as a list of its items."""
    return _call("list", [operand]) if isinstance(operand, ast.GeneratorExp) else operand


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), arguments, [])


def _called_name(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_literal(node: ast.AST) -> bool:
    """Whether a node is a constant, or consists of signs, containers and constants alone."""
    kinds = (
        ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.USub, ast.UAdd,
        ast.Load,
    )  # fmt: skip
    return all(isinstance(part, kinds) for part in ast.walk(node))
