"""JSON forms of Python values and of the results of calls. Runs in boxes and on the host.

Only literals, containers of them and importable callables can be encoded. Standard library only.
"""

import builtins
import contextlib
import functools
import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, BuiltinFunctionType, CoroutineType, FunctionType, MethodType
from typing import Any

MAX_TEXT = 4_000
_MAX_ITEMS = 200
_MAX_DEPTH = 8
_MAX_EXPANDED = 40  # containers that are described item by item, in a value that cannot be encoded
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE, which every class defined in Python has
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_CALLABLES = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_WAITING = (CoroutineType, AsyncGeneratorType)
_WAIT_SECONDS = 0.3
_ITERATOR_METHODS = {"send", "throw", "close", "from_iterable"}
_NAMES = {kind: name for name, kind in _CONTAINERS.items()}


class NotEncodable(Exception):
    """A value without a JSON form."""


class CallTimeout(BaseException):
    """A call used more CPU time than it may."""


def expire(number: int, frame: Any) -> None:
    """A signal handler that raises CallTimeout in the running code."""
    raise CallTimeout


def encode(value: Any, depth: int = 0) -> Any:
    """The JSON form of a value. Raises NotEncodable if there is none."""
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise NotEncodable
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
    raise NotEncodable


def decode(form: Any) -> Any:
    """The value of a JSON form."""
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
    """Import name of an object. Does not call the object's own hooks, which may raise anything or change it."""
    read = type.__getattribute__ if issubclass(type(value), type) else object.__getattribute__
    try:
        name = f"{read(value, '__module__') or 'builtins'}:{read(value, '__qualname__')}"
        if find(name) is value:
            return name
    except Exception:  # noqa: BLE001 - modules under test may raise anything
        pass
    raise NotEncodable


def find(name: str) -> Any:
    """The object that `module:path` names."""
    module, _, path = name.partition(":")
    found: Any = builtins if module == "builtins" else importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def describe(call: Callable[[], Any], facts: set[str] | None = None) -> Any:
    """Result of a call as a form: its value, that of its coroutine, the items of its iterator, or its exception's type.
    An exception without a text is added to `facts`.
    """
    try:
        value = call()
        if type(value) is CoroutineType:
            return {"awaits": _describe_value(_wait_for(value))}
        if isinstance(value, Iterator):
            items = [item for item, _ in zip(value, range(_MAX_ITEMS), strict=False)]
            return {"iterates": [_describe_value(item) for item in items]}
        return {"returns": _describe_value(value)}
    except CallTimeout:
        return {"timeout": True}
    except Exception as error:  # noqa: BLE001 - code under test may raise anything
        note_silence(error, set() if facts is None else facts)
        return {"raises": type(error).__name__}


def note_silence(error: Exception, facts: set[str]) -> None:
    """Adds an exception without a text to `facts`. Its class may have a `__str__` that raises."""
    with contextlib.suppress(Exception):
        if not str(error):
            facts.add(f"raises {type(error).__name__} without a text")


def _wait_for(waiting: CoroutineType) -> Any:
    """The result of a coroutine, in an event loop of its own. Raises TimeoutError after _WAIT_SECONDS."""
    import asyncio  # noqa: PLC0415 - few functions are coroutines

    async def wait() -> Any:
        return await asyncio.wait_for(waiting, _WAIT_SECONDS)

    return asyncio.run(wait())


def _describe_value(value: Any) -> Any:
    form = _form_or_text(value, iter(range(_MAX_EXPANDED)))
    text = json.dumps(form)
    return form if len(text) <= 10 * MAX_TEXT else {"text": "long", "sha256": _digest(text)}


def _form_or_text(value: Any, budget: Iterator[int]) -> Any:
    """The form of a value, with text for parts that have none. Sets are sorted, since their order depends on addresses."""
    try:
        return encode(value)
    except (NotEncodable, RecursionError):
        kind = type(value)
    if kind in (*_NAMES, dict) and len(value) <= _MAX_ITEMS and next(budget, None) is not None:
        items = value.items() if kind is dict else value
        forms = [_form_or_text(item, budget) for item in items]
        return {kind.__name__: sorted(forms, key=json.dumps) if kind in (set, frozenset) else forms}
    if is_builtin_iterator(value) or kind in (*_CALLABLES, *_WAITING):
        return {"type": kind_of(value), "text": ""}  # its repr depends on how it is implemented
    text = _ADDRESS.sub("0x", repr(value))
    cut = {"sha256": _digest(text)} if len(text) > MAX_TEXT else {}
    return {"type": kind.__name__, "text": text[:MAX_TEXT], **cut}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def kind_of(value: Any) -> str:
    """Name of a value's type. A class defined in Python has the prefix "made", because it may take the name and
    module of a built-in type. All iterators that compare by identity are one kind, all functions another.
    """
    kind = type(value)
    if kind in _CALLABLES:
        return "callable"
    if not _compares(kind) and issubclass(kind, Iterator):
        return "iterator"
    is_made = type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE
    try:
        name = "None" if value is None else _name_of(kind)
    except NotEncodable:
        name = "" if is_made else kind.__name__
    return f"made {name}" if is_made else name


def kinds_in(value: Any) -> set[str]:
    """Kinds of the values in plain containers, at any depth that can be encoded."""
    found: dict[tuple[type, bool], Any] = {}
    waiting = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        kind = type(one)
        if depth:
            found.setdefault((kind, one is None), one)
        if depth < _MAX_DEPTH and kind in (*_NAMES, dict) and len(one) <= _MAX_ITEMS:
            items = (*one, *one.values()) if kind is dict else one
            waiting += [(item, depth + 1) for item in items]
    return {kind_of(one) for one in found.values()}


def is_builtin_iterator(value: Any) -> bool:
    """Whether a value is an iterator without further public attributes, such as a generator."""
    kind = type(value)
    is_made = type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE
    public = {name for name in dir(kind) if name[0] != "_" and name[:3] != "gi_"}
    return not is_made and issubclass(kind, Iterator) and public <= _ITERATOR_METHODS


def _compares(kind: type) -> bool:
    """Whether a class or one of its bases except object defines a comparison. Does not ask the metaclass."""
    bases = type.__dict__["__mro__"].__get__(kind)[:-1]
    namespaces = [type.__dict__["__dict__"].__get__(base) for base in bases]
    return any(name in names for names in namespaces for name in ("__eq__", "__ne__"))


def describe_text(value: Any) -> Any:
    """The form of a value, or the type of the exception that its own methods raise."""
    try:
        return _describe_value(value)
    except Exception as error:  # noqa: BLE001 - code under test may raise anything
        return {"unreadable": type(error).__name__}
