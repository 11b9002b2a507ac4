"""Repetition of calls, to find results or effects that change and memory that grows. Runs in boxes, standard library
only.

`KeptCalls`: calls that tests make, with deep copies of their arguments, for arguments that no drawn call can build.
`describe_effect`: the result of a call, with the state of its arguments before and after. `measure_growth`: memory
that a call retains.
"""

import contextlib
import copy
import copyreg
import functools
import hashlib
import json
import signal
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any

from ostinato.infra.sandbox.inside.value_forms import (
    CallTimeout,
    NotEncodable,
    describe,
    encode,
    expire,
)

_REPEATED_SECONDS = 1.0
_TRACED = 40  # calls over which memory growth is measured
_CALL_SECONDS = 0.3
_WALL_SECONDS = 0.5  # for a call on uncopied objects, which may wait for a lock
_FLAGS = ("is_read", "stays", "stays_on_object", "acts_on_object")
_COPIED, _UNCOPIED = "copied", "uncopied"  # first words of keys
_COPY_SECONDS = 0.3
_LATER_COPY_SECONDS = 5.0  # for a call that an earlier run copied
_LATER_DEPTHS = 4  # factor on the recursion limit for it
_ALL_COPIES_SECONDS = 2.0
_MAX_KEPT = 8  # copied calls
_MAX_UNCOPIED = 3
_MAX_COPIED = 64
_MAX_OBJECTS = 5_000  # in the digest of a state
_MAX_SHARED = 20_000
_PLAIN = (NoneType, bool, int, float, complex, str, bytes)
_WITHOUT_STATE = (type, ModuleType, FunctionType, MethodType)
BoundCall = functools.partial[Any]


def describe_limited(
    call: BoundCall, seconds: float = _CALL_SECONDS, facts: set[str] | None = None
) -> dict[str, Any]:
    """The result of a call as a form, with limited processor time. `facts` gets an exception without a text."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        return describe(call, facts)
    except CallTimeout:
        return {"timeout": True}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def measure_growth(make_call: Callable[[], BoundCall], repeats: int) -> float:
    """Bytes by which memory grows per call, after `repeats` calls. `make_call` returns the next call."""
    _repeat(make_call, repeats)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    num_traced = _repeat(make_call, _TRACED)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / max(1, num_traced)


def _repeat(make_call: Callable[[], BoundCall], count: int) -> int:
    """Number of calls made, up to `count`, within _REPEATED_SECONDS of processor time and ten times that of wall time."""
    ends = time.process_time() + _REPEATED_SECONDS, time.monotonic() + 10 * _REPEATED_SECONDS
    num_made = 0
    with contextlib.suppress(BaseException):
        while num_made < count and time.process_time() < ends[0] and time.monotonic() < ends[1]:
            describe_limited(make_call())
            num_made += 1
    return num_made


def make_again(
    function: Callable, plain: tuple[Any, ...], named: dict[str, Any], count: int
) -> None:
    """Makes a call up to `count` times, each with a limit of time, and drops its results. The test's timer is stopped."""
    call = functools.partial(_call_within, _WALL_SECONDS, function, *plain, **named)
    left = signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    _repeat(lambda: call, count)
    signal.setitimer(signal.ITIMER_VIRTUAL, *left)


def describe_effect(call: BoundCall, values: Collection[Any]) -> dict[str, Any]:
    """Result of a call, with digests of `values`, its arguments and its object, before and after it."""
    states = [_digest_limited(values)]
    form = describe_limited(call)
    return {**form, "states": [*states, _digest_limited(values)]}


def has_effect(form: dict[str, Any]) -> bool:
    """Whether a call returned, and either returned a value or changed its arguments."""
    first, second = form.get("states", ("", ""))
    value = form.get("returns", form.get("awaits", form.get("iterates")))
    return value is not None or (bool({"returns", "awaits"} & form.keys()) and first != second)


def _digest_limited(values: Collection[Any]) -> str:
    with contextlib.suppress(Exception):
        return digest_state(values)
    return ""


def digest_state(value: Any) -> str:
    """Digest of a value and of everything it refers to, up to 5,000 objects. Does not call `__getattr__`. Raises any
    exception of a class's own `__dict__` or slot, and RecursionError.
    """
    seen: dict[int, tuple[int, Any]] = {}
    text = json.dumps(_state_of(value, seen))
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def _state_of(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """`seen` holds each object with its number, which keeps it alive, so that no later object gets its id."""
    kind = type(value)
    with contextlib.suppress(NotEncodable, RecursionError):
        return encode(value)
    if id(value) in seen or len(seen) == _MAX_OBJECTS or issubclass(kind, _WITHOUT_STATE):
        return {kind.__name__: seen.get(id(value), (None,))[0]}
    seen[id(value)] = len(seen), value
    parts: list[Any] = []
    for base, items in ((dict, dict.items), (list, list.__iter__), (tuple, tuple.__iter__)):
        parts += items(value) if issubclass(kind, base) else []
    parts += [base.__repr__(value) for base in (str, bytes, int, float) if issubclass(kind, base)]
    for name in ("__dict__", *copyreg._slotnames(kind)):  # pyright: ignore # slots of all base classes, as `copy` uses
        with contextlib.suppress(AttributeError, TypeError):
            parts.append((name, object.__getattribute__(value, name)))
    return {kind.__name__: [_state_of(it, seen) for it in parts]}


def find_shared(package: str) -> dict[int, Any]:
    """Objects that are reachable from the modules of a package, by id, as a memo for `copy.deepcopy`. Copies of a call
    share them, because code may compare with such an object by identity.
    """
    modules = [
        module
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith(f"{package}.") and isinstance(module, ModuleType)
    ]
    open_values = [value for module in modules for value in vars(module).values()]
    shared: dict[int, Any] = {}
    while open_values and len(shared) < _MAX_SHARED:
        value = open_values.pop()
        kind = type(value)
        if id(value) in shared or kind in _PLAIN or issubclass(kind, _WITHOUT_STATE):
            continue
        shared[id(value)] = value
        if kind in (list, tuple):
            open_values += value
        with contextlib.suppress(AttributeError, TypeError):
            names = value if kind is dict else object.__getattribute__(value, "__dict__")
            open_values += names.values()
    return shared


class KeptCalls:
    """The first calls of the tests, or one call that an earlier run named. Each has deep copies of its arguments, or if
    they cannot be copied the arguments themselves, with which the call is made again after the tests.

    Copying an object calls its hooks, and some hooks change it, such as a `__getattr__` that opens a table. Therefore a
    later run copies the same calls as the first run, even those that it does not keep.
    """

    def __init__(self, wanted: str | None, copied: Collection[str]) -> None:
        """`wanted`: the call to keep; None: this is the first run. `copied`: places of the calls that the first run copied."""
        self._wanted = wanted
        self._places = copied
        self._kept: dict[str, tuple[Callable, Any]] = {}
        self._shared: dict[int, Any] = {}
        self._left_seconds = _ALL_COPIES_SECONDS
        self._has_failed = False  # the wanted call could not be copied
        self.copied: list[str] = []

    def offer(
        self, place: str, function: Callable, plain: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Copies a call that is about to be made, and keeps it if it is wanted. `place`: the test, and the call's
        number in it.

        The test's timer is stopped meanwhile. Its signal reaches only the main thread, so calls of other threads are
        not kept.
        """
        is_main = threading.current_thread() is threading.main_thread()
        wanted, is_first = self._wanted or "", self._wanted is None
        num_kept = Counter(key.partition(" ")[0] for key in self._kept)
        has_capacity = (
            num_kept[_COPIED] < _MAX_KEPT
            and len(self.copied) < _MAX_COPIED
            and self._left_seconds > 0
        )
        if not is_main or not (has_capacity if is_first else place in self._places):
            return
        self.copied.append(place)
        kind, _, place_and_digest = wanted.partition(" ")
        is_wanted = is_first or place_and_digest.rpartition(" ")[0] == place
        key = f"{place} {_digest_of(plain, named)}"
        # A later run has wider limits, because a change may make objects larger or more deeply nested.
        seconds = _COPY_SECONDS if is_first else _LATER_COPY_SECONDS
        started = time.process_time()
        left = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            if not self._shared:
                self._shared = find_shared(function.__module__.partition(".")[0])
            arguments = self._deep_copy((plain, named))
            if is_wanted and kind != _UNCOPIED:
                self._kept[f"{_COPIED} {key}"] = (function, arguments)
        except BaseException:  # noqa: BLE001 - classes under test may raise anything
            self._has_failed |= is_wanted and kind == _COPIED
            kind = _UNCOPIED if is_first and num_kept[_UNCOPIED] < _MAX_UNCOPIED else kind
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, *left)
            self._left_seconds -= time.process_time() - started
        if is_wanted and kind == _UNCOPIED:
            self._kept[f"{_UNCOPIED} {key}"] = (function, (plain, named))

    def repeat(self, repeats: int) -> dict[str, Any] | None:
        """Measurements of the first call with an effect when it is repeated. It is compared only with itself, since an
        honest change may represent its objects differently from the original. None: no call was kept.

        Of a call with uncopied arguments only `leaked` is measured, because earlier calls may have changed them.

        `stays`: after many calls, the effect on a fresh copy is the same as before. `stays_on_object`: the result on one
        reused copy is the same. `acts_on_object`: the call still has an effect on that copy. `is_read`: the state of the
        arguments can be read. `leaked`: bytes per call. Only `is_copied`, false: the call that an earlier run named
        cannot be copied, or not a second time.
        """
        refusal = {"key": self._wanted, "is_copied": False} if self._wanted else None
        if not self._kept:
            return refusal if self._has_failed else None
        try:
            return self._measure(repeats)
        except Exception:  # noqa: BLE001 - a class may refuse a copy that it allowed before
            return refusal

    def _measure(self, repeats: int) -> dict[str, Any] | None:
        """The measurements of `repeat`. Raises any exception of a class that refuses to be copied."""
        before = {key: self._try_once(key) for key in self._kept}
        returning = [k for k, form in before.items() if not {"raises", "timeout"} & form.keys()]
        returning.sort(key=lambda key: (key.startswith(_UNCOPIED), not has_effect(before[key])))
        ending = [key for key, form in before.items() if "timeout" not in form]
        copied = [key for key in before if key.startswith(_COPIED)]
        key = next(iter((*returning, *copied, *ending)), None)
        if key is None:
            return None
        used = self._copy(key)
        first = describe_limited(used)
        measured = {"key": key, "is_copied": True, "leaked": measure_growth(lambda: used, repeats)}
        if key.startswith(_UNCOPIED):
            return measured | dict.fromkeys(_FLAGS, False)
        return {
            **measured,
            "is_read": all(before[key]["states"]),
            "stays": self._try_once(key) == before[key],
            "stays_on_object": describe_limited(used) == first,
            "acts_on_object": has_effect(describe_effect(used, [used.args, used.keywords])),
        }

    def _copy(self, key: str) -> BoundCall:
        """The call on fresh copies of its arguments, or on the arguments themselves with a limit of wall time."""
        function, arguments = self._kept[key]
        if key.startswith(_UNCOPIED):
            plain, named = arguments
            return functools.partial(_call_within, _WALL_SECONDS, function, *plain, **named)
        plain, named = self._deep_copy(arguments)
        return functools.partial(function, *plain, **named)

    def _deep_copy(self, arguments: Any) -> Any:
        """A copy of arguments. A later run may nest deeper, because the frames above it differ from the first run's."""
        depth = sys.getrecursionlimit()
        sys.setrecursionlimit(depth if self._wanted is None else _LATER_DEPTHS * depth)
        try:
            return copy.deepcopy(arguments, {**self._shared})
        finally:
            sys.setrecursionlimit(depth)

    def _try_once(self, key: str) -> dict[str, Any]:
        call = self._copy(key)
        if key.startswith(_UNCOPIED):
            return describe_limited(call)
        return describe_effect(call, [call.args, call.keywords])


def _call_within(seconds: float, function: Callable, /, *plain: Any, **named: Any) -> Any:
    """The result of a call. Raises CallTimeout after `seconds` of wall time."""
    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function(*plain, **named)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _digest_of(plain: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Digest of the arguments that are plain data, and of the types of all others."""
    text = json.dumps([_form_of(it) for it in (*plain, *named.values())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _form_of(value: Any) -> Any:
    try:
        return encode(value)
    except (NotEncodable, RecursionError):
        return type(value).__name__
