"""Detects when tested code has replaced parts of the test runner or the tests themselves.

It takes a snapshot of the code that decides a verdict (functions of pytest's runner, of pluggy, of unittest's
assertions, every registered hook, built-in functions) and compares it during and after the run. It also checks that a
test about to run still has the code of its pristine file. Runs inside the box.
"""

import builtins
import operator
import sys
import types
from collections.abc import Mapping

import pytest

_DEEPEST_WRAPPING = 20
_WATCHED = (
    "_pytest.runner",
    "_pytest.python",
    "_pytest.fixtures",
    "_pytest.unittest",
    "_pytest.raises",
    "_pytest.outcomes",
    "_pytest.reports",
    "_pytest.skipping",
    "_pytest._code.code",
    "pluggy._hooks",
    "pluggy._manager",
    "pluggy._callers",
    "unittest.case",
    "ostinato.infra.sandbox.inside.test_runner",
    "ostinato.infra.sandbox.inside.integrity",
    "ostinato.infra.sandbox.inside.wire",
)
_WATCHED_BUILTINS = tuple(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, (types.BuiltinFunctionType, type))
)
_WATCHED_OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "is_", "not_", "contains")

Namespace = dict[str, object] | types.MappingProxyType
# label, namespace, name, value, and the function and its code if the value is or wraps a function
Entry = tuple[str, Namespace, str, object, types.FunctionType | None, types.CodeType | None]


class RunnerState:
    """Watched state of the interpreter before any tested code ran."""

    def __init__(self, entries: list[Entry], manager: pytest.PytestPluginManager) -> None:
        self.entries = entries
        self.manager = manager
        self.hooks = _list_hooks(manager)

    def renew_hooks(self) -> None:
        """Accepts hook implementations added since, by plugins and conftest.py files. A hook that lost an earlier
        implementation keeps its old entry, so that `find_changes` reports it.
        """
        for name, now in _list_hooks(self.manager).items():
            if all(known in now for known in self.hooks.get(name, [])):
                self.hooks[name] = now


def take_snapshot(manager: pytest.PytestPluginManager) -> RunnerState:
    """A snapshot of every function of the watched modules and their classes with its code, and of every hook."""
    entries: list[Entry] = []
    for name in _WATCHED:
        module = sys.modules.get(name)
        if module is None:
            continue
        namespaces = [(name, vars(module))]
        namespaces += [
            (f"{name}.{key}", vars(value))
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == name
        ]
        for label, namespace in namespaces:
            for key, value in list(namespace.items()):
                if isinstance(value, _WATCHED_KINDS):
                    function, code = _function_of(value)
                    entries.append((label, namespace, key, value, function, code))
    for label, module, keys in (
        ("builtins", builtins, _WATCHED_BUILTINS),
        ("operator", operator, _WATCHED_OPERATORS),
    ):
        for key in keys:
            entries.append((label, vars(module), key, vars(module)[key], None, None))
    return RunnerState(entries, manager)


def find_changes(snapshot: RunnerState) -> list[str]:
    """Names of the entries and hooks that differ from the snapshot."""
    changed = [
        f"{label}.{key}"
        for label, namespace, key, value, function, code in snapshot.entries
        # inlined for speed: 1,400 entries are compared after every test
        if namespace.get(key) is not value
        or (function is not None and function.__code__ is not code)
    ]
    hooks = _list_hooks(snapshot.manager)
    if hooks != snapshot.hooks:
        names = {*hooks, *snapshot.hooks}
        changed += [
            f"hook {name}" for name in sorted(names) if hooks.get(name) != snapshot.hooks.get(name)
        ]
    return changed


class TestCodes:
    """The code of each test in its pristine file.

    Tests that are functions of another file (made by a decorator, inherited) are not checked, because
    product code may legitimately change them.
    """

    __test__ = False

    def __init__(self, root: str, pristine: Mapping[str, types.CodeType]) -> None:
        """`pristine`: code by test, loaded before any code of the repository ran."""
        self._root = root
        self._codes = dict(pristine)

    def add(self, items: Mapping[str, pytest.Item]) -> None:
        """Adds the code of collected tests whose pristine code is unknown."""
        for test, item in items.items():
            if test not in self._codes and (code := _own_code(self._root, item)) is not None:
                self._codes[test] = code

    def holds(self, item: pytest.Item) -> bool:
        """Whether an item's code equals its pristine code or, if that is unknown, the code at collection."""
        wanted = self._codes.get(item.nodeid)
        return wanted is None or _test_code(item) == wanted


def place_tests(root: str, items: Mapping[str, pytest.Item]) -> dict[str, tuple[str, int]]:
    """Qualified name and first line of each test that is an unwrapped function of its own file."""
    codes = {test: _own_code(root, item) for test, item in items.items()}
    return {
        test: (code.co_qualname, code.co_firstlineno)
        for test, code in codes.items()
        if code is not None and not hasattr(getattr(items[test], "obj", None), "__wrapped__")
    }


def find_codes(code: types.CodeType) -> dict[tuple[str, int], types.CodeType]:
    """Code of each function and class in a module's code, by qualified name and first line."""
    found: dict[tuple[str, int], types.CodeType] = {}
    rest = [code]
    while rest:
        inner = [value for value in rest.pop().co_consts if isinstance(value, types.CodeType)]
        found |= {(value.co_qualname, value.co_firstlineno): value for value in inner}
        rest += inner
    return found


def _own_code(root: str, item: pytest.Item) -> types.CodeType | None:
    """Code of a test that is a function of its own file."""
    code = _test_code(item)
    path = f"{root}/{item.nodeid.partition('::')[0]}"
    return code if code is not None and code.co_filename == path else None


def _test_code(item: pytest.Item) -> types.CodeType | None:
    """Code of the innermost function of a test."""
    function = getattr(item, "obj", None)
    function = getattr(function, "__func__", function)
    for _ in range(_DEEPEST_WRAPPING):
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return function.__code__ if isinstance(function, types.FunctionType) else None


def _list_hooks(
    manager: pytest.PytestPluginManager,
) -> dict[str, list[tuple[int, object, object]]]:
    """Each hook's implementations in order, as id, function and code."""
    return {
        name: [
            (id(implementation), implementation.function, _function_of(implementation.function)[1])
            for implementation in caller.get_hookimpls()
        ]
        for name, caller in vars(manager.hook).items()
        if not name.startswith("_")
    }


_WATCHED_KINDS = (types.FunctionType, type, classmethod, staticmethod, property)


def _function_of(value: object) -> tuple[types.FunctionType, types.CodeType] | tuple[None, None]:
    """The function that a value is or wraps, and its code."""
    function = getattr(value, "__func__", value)
    return (
        (function, function.__code__) if isinstance(function, types.FunctionType) else (None, None)
    )
