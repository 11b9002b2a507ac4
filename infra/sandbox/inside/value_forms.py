"""JSON forms of Python values and of the results of calls. Runs in boxes and on the host.

Only literals, containers of them and importable callables have a form. Standard library only.
"""

import builtins
import functools
import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

MAX_TEXT = 4_000
_MAX_ITEMS = 200
_MAX_DEPTH = 8
_MAX_OPENED = 40  # containers of a value that holds other objects too
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: every class that Python code makes
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_CALLABLES = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_OF_ITERATORS = {"send", "throw", "close", "from_iterable"}
_NAMES = {kind: name for name, kind in _CONTAINERS.items()}


class NoForm(Exception):
    """A value that cannot be written down."""


class CallTimeout(BaseException):
    """A call used more CPU time than it may."""


def expire(number: int, frame: Any) -> None:
    """A signal handler: CallTimeout in whatever runs."""
    raise CallTimeout


def encode(value: Any, depth: int = 0) -> Any:
    """The JSON form of a value. NoForm when there is none."""
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise NoForm
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": value.hex() if math.isfinite(value) else repr(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in _NAMES:
        items = [encode(item, depth + 1) for item in value]
        if kind in (set, frozenset):
            items.sort(key=json.dumps)
        return {_NAMES[kind]: items}
    if kind is dict:
        return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    if callable(value):
        return {"name": _name_of(value)}
    raise NoForm


def decode(form: Any) -> Any:
    """The value of a form."""
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == "float":
        return float(content) if content in ("inf", "-inf", "nan") else float.fromhex(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key): decode(value) for key, value in content}
    if kind == "name":
        return find(content)
    return _CONTAINERS[kind](decode(item) for item in content)


def _name_of(value: Any) -> str:
    try:
        name = f"{value.__module__ or 'builtins'}:{value.__qualname__}"
        if find(name) is value:
            return name
    except (AttributeError, ImportError, TypeError, ValueError):
        pass
    raise NoForm


def find(name: str) -> Any:
    """The object that `module:path` names."""
    module, _, path = name.partition(":")
    found: Any = builtins if module == "builtins" else importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def describe(call: Callable[[], Any]) -> Any:
    """Result of a call as a form: its value, the items of its iterator, or its exception's type."""
    try:
        value = call()
        if isinstance(value, Iterator):
            items = [item for item, _ in zip(value, range(_MAX_ITEMS), strict=False)]
            return {"iterates": [_describe_value(item) for item in items]}
        return {"returns": _describe_value(value)}
    except CallTimeout:
        return {"timeout": True}
    except Exception as error:  # noqa: BLE001 - code under test raises anything
        return {"raises": type(error).__name__}


def _describe_value(value: Any) -> Any:
    form = _form_or_text(value, iter(range(_MAX_OPENED)))
    text = json.dumps(form)
    return form if len(text) <= 10 * MAX_TEXT else {"text": "long", "sha256": _digest(text)}


def _form_or_text(value: Any, opened: Iterator[int]) -> Any:
    """The form of a value, with text for parts that have none. Sets are sorted: addresses decide their order."""
    try:
        return encode(value)
    except (NoForm, RecursionError):
        kind = type(value)
    if kind in (*_NAMES, dict) and len(value) <= _MAX_ITEMS and next(opened, None) is not None:
        items = value.items() if kind is dict else value
        forms = [_form_or_text(item, opened) for item in items]
        return {kind.__name__: sorted(forms, key=json.dumps) if kind in (set, frozenset) else forms}
    if is_builtin_iterator(value) or kind in _CALLABLES:
        return {"type": kind_of(value), "text": ""}  # its text tells how it is written
    text = _ADDRESS.sub("0x", repr(value))
    cut = {"sha256": _digest(text)} if len(text) > MAX_TEXT else {}
    return {"type": kind.__name__, "text": text[:MAX_TEXT], **cut}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def kind_of(value: Any) -> str:
    """Name of a value's type, after "made" for a class defined in Python: such a class may take the name
    and module of a built-in type. Iterators that compare as objects do are of one kind, functions of another.
    """
    kind = type(value)
    if kind in _CALLABLES:
        return "callable"
    if not _compares(kind) and issubclass(kind, Iterator):
        return "iterator"
    is_made = type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE
    try:
        name = "None" if value is None else _name_of(kind)
    except NoForm:
        name = "" if is_made else kind.__name__
    return f"made {name}" if is_made else name


def is_builtin_iterator(value: Any) -> bool:
    """Whether an iterator has nothing but its items: a generator, or one of the standard library's."""
    kind = type(value)
    is_made = type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE
    public = {name for name in dir(kind) if name[0] != "_" and name[:3] != "gi_"}
    return not is_made and issubclass(kind, Iterator) and public <= _OF_ITERATORS


def _compares(kind: type) -> bool:
    """Whether a class or one of its bases but object defines a comparison, whatever its metaclass says."""
    bases = type.__dict__["__mro__"].__get__(kind)[:-1]
    held = [type.__dict__["__dict__"].__get__(base) for base in bases]
    return any(name in names for names in held for name in ("__eq__", "__ne__"))


def describe_text(value: Any) -> Any:
    """The form of a value, or the type of the exception that its own methods end in."""
    try:
        return _describe_value(value)
    except Exception as error:  # noqa: BLE001 - code under test raises anything
        return {"unreadable": type(error).__name__}
