"""Notices when tested code has replaced parts of the test runner.

Owns a snapshot of the functions that decide a verdict (pytest's runner, unittest's assertions) and
its comparison after the run. Runs inside the box.
"""

import builtins
import sys
import types

_WATCHED = (
    "_pytest.runner",
    "_pytest.python",
    "_pytest.unittest",
    "_pytest.raises",
    "_pytest.outcomes",
    "_pytest.reports",
    "_pytest.skipping",
    "pluggy._hooks",
    "pluggy._manager",
    "pluggy._callers",
    "unittest.case",
    "infra.sandbox.inside.test_runner",
    "infra.sandbox.inside.wire",
)
_WATCHED_BUILTINS = (
    "isinstance",
    "bool",
    "len",
    "all",
    "any",
    "type",
    "getattr",
    "sum",
    "sorted",
    "repr",
)

Snapshot = list[tuple[str, dict[str, object] | types.MappingProxyType, str, object, object]]


def take_snapshot() -> Snapshot:
    """Every function of the watched modules and of their classes, with its code."""
    entries: Snapshot = []
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
                if isinstance(value, (types.FunctionType, type)):
                    entries.append((label, namespace, key, value, _code_of(value)))
    for key in _WATCHED_BUILTINS:
        entries.append(("builtins", vars(builtins), key, vars(builtins)[key], None))
    return entries


def find_changes(snapshot: Snapshot) -> list[str]:
    """Names of what is no longer as it was."""
    return [
        f"{label}.{key}"
        for label, namespace, key, value, code in snapshot
        if namespace.get(key) is not value or _code_of(value) is not code
    ]


def _code_of(value: object) -> object:
    return value.__code__ if isinstance(value, types.FunctionType) else None
