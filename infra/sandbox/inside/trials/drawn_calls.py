"""Calls with drawn arguments: of one function that tests call, and of all that a module shows. Runs in boxes,
standard library only.

`draw_calls`: calls that return something, drawn where the original alone is. `make_drawn_calls`: what each gives
and does, whether names are still there and still take what they took.
"""

import contextlib
import importlib
import inspect
import json
import random
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from ostinato.infra.sandbox.inside.trials.perturbation import vary_call, vary_value
from ostinato.infra.sandbox.inside.trials.watched_calls import Effects
from ostinato.infra.sandbox.inside.value_forms import (
    MAX_TEXT,
    CallTimeout,
    NoForm,
    decode,
    describe,
    encode,
    expire,
    find,
)

_POOL: tuple[Any, ...] = (
    "abc", 3, "", 0, ["a", "b c"], 2.5, None, True, {"a": 1}, [3, 1, 2], "12 Ab-c", (1, "a"), -1, b"ab",
    [], "2012-03-04T05:06:07", "1.5", "a,b;c", {"a": [1], "b": "c"}, 1000, [[1, 2], [3, 4]], {"x", "y"},
)  # fmt: skip
_BY_NAME = {
    "str": "Ab c1",
    "int": 7,
    "float": 1.5,
    "bool": True,
    "list": ["b", "a"],
    "dict": {"a": 1},
    "bytes": b"a",
}
_TRIES, _KEPT = 40, 4  # of each function of a module
_VARIED = 3  # of each known call
_FROM_POOL = 12  # further calls of the known function
_DRAW_SECONDS = 6.0
_WORN_SECONDS = 1.0
_TRACED = 40  # calls in which growing memory is measured
_CALL_SECONDS = 0.3
Call = dict[str, Any]


def draw_calls(request: dict, answer: str) -> None:
    """Writes calls that return, and names with the shapes of calls they take."""
    signal.signal(signal.SIGVTALRM, expire)
    rng = random.Random(request["order"])
    ends = time.monotonic() + _DRAW_SECONDS
    with Path(answer).open("w") as file:
        for call in _drawn(request, rng):
            if time.monotonic() > ends:
                return
            if "name" in call or _returns(call):
                file.write(json.dumps(call) + "\n")
                file.flush()


def _drawn(request: dict, rng: random.Random) -> Iterator[Call]:
    if request["known"]:
        yield from _near(request["known"], rng)
        function = find(request["known"][0]["function"])
        for arguments in _guesses(function, 0, rng, _FROM_POOL):
            yield {"function": request["known"][0]["function"], "on": None, "arguments": arguments}
    elif request["function"]:  # tests call it with objects alone, or on one
        with contextlib.suppress(Exception):
            name = request["function"]
            found = _calls_of(name, int(_is_method(name)), rng)
            yield from (call for call in found if "function" in call)
    for module, left_out in request["modules"]:
        with contextlib.suppress(Exception):
            for name, skipped in _shown_names(importlib.import_module(module), left_out):
                yield from _calls_of(f"{module}:{name}", skipped, rng)


def _is_method(name: str) -> bool:
    """Whether a function is called on an object of a class."""
    owner, _, last = name.rpartition(".")
    return ":" in owner and type(inspect.getattr_static(find(owner), last)) is FunctionType


def _near(known: list[Call], rng: random.Random) -> Iterator[Call]:
    for call in known:
        yield call
        for _ in range(_VARIED):
            plain, named = _read(call["arguments"])
            with contextlib.suppress(NoForm, RecursionError):
                yield {**call, "arguments": _text(*vary_call(tuple(plain), named, 0, rng))}


def _shown_names(module: Any, left_out: list[str]) -> Iterator[tuple[str, int]]:
    """Public functions, classes, and what classes define, each with the number of leading parameters that are given."""
    for name, value in list(vars(module).items()):
        is_own = inspect.getmodule(value) is module
        if name.startswith("_") or not is_own or not callable(value):
            continue
        yield from [] if name in left_out else [(name, 0)]
        for inner, held in list(vars(value).items()) if isinstance(value, type) else ():
            is_shown = not inner.startswith("_") or inner in (
                "__str__",
                "__len__",
                "__call__",
                "__repr__",
            )
            is_code = callable(held) or isinstance(held, (property, staticmethod, classmethod))
            if is_shown and is_code and f"{name}.{inner}" not in left_out:
                yield f"{name}.{inner}", int(callable(held))


def _calls_of(name: str, skipped: int, rng: random.Random) -> Iterator[Call]:
    value = find(name)
    yield {"name": name, "shapes": list(_shapes(value))}
    if isinstance(value, property) or not callable(value):
        return
    made: Sequence[str | None] = [None]
    if skipped:
        owner = name.rpartition(".")[0]
        tried = _guesses(find(owner), 0, rng, _TRIES)
        made = [
            text for text in tried if _returns({"function": owner, "on": None, "arguments": text})
        ][:1]
    num_kept = 0
    for arguments in _guesses(value, skipped, rng, _TRIES) if made else ():
        call = {"function": name, "on": made[0], "arguments": arguments}
        if num_kept < _KEPT and _returns(call):
            num_kept += 1
            yield call


def _shapes(value: Any) -> Iterator[tuple[int, list[str]]]:
    """Numbers of plain arguments and names of others with which it can be called."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (ValueError, TypeError):
        return
    named = [it for it in parameters if it.kind is it.KEYWORD_ONLY and it.default is it.empty]
    plain = [it for it in parameters if it.kind in (it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD)]
    given = [it.name for it in named]
    yield sum(it.default is it.empty for it in plain), given
    yield len(plain), given
    fixed = [it for it in plain if it.kind is it.POSITIONAL_ONLY]
    others = [
        it.name for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)
    ]
    yield (len(fixed) or 1, others[1:]) if not fixed and plain else (len(fixed), others)


def _guesses(function: Any, skipped: int, rng: random.Random, count: int) -> Iterator[str]:
    """Arguments by what annotations and defaults say, else any plain data."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[skipped:]
    except (ValueError, TypeError):
        return
    wanted = [it for it in parameters if it.kind in (it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD)]
    named = [it for it in parameters if it.kind is it.KEYWORD_ONLY and it.default is it.empty]
    num_least = sum(it.default is it.empty for it in wanted)
    seen: set[str] = set()
    for _ in range(count if parameters else 1):
        num_given = num_least if rng.random() < 0.6 else rng.randint(num_least, len(wanted))
        plain = [_guess(it, rng) for it in wanted[:num_given]]
        with contextlib.suppress(NoForm, RecursionError):
            text = _text(tuple(plain), {it.name: _guess(it, rng) for it in named})
            if text not in seen:
                seen.add(text)
                yield text


def _guess(parameter: inspect.Parameter, rng: random.Random) -> Any:
    told = str(parameter.annotation).removeprefix("<class '").partition("'")[0].partition("[")[0]
    if told in _BY_NAME and rng.random() < 0.9:
        return vary_value(_BY_NAME[told], rng)
    if parameter.default not in (parameter.empty, None) and rng.random() < 0.7:
        return vary_value(parameter.default, rng)
    return vary_value(rng.choice(_POOL), rng) if rng.random() < 0.5 else rng.choice(_POOL)


def _text(plain: tuple[Any, ...], named: dict[str, Any]) -> str:
    forms = {
        "plain": [encode(it) for it in plain],
        "named": {k: encode(v) for k, v in named.items()},
    }
    text = json.dumps(forms)
    if len(text) > MAX_TEXT:
        raise NoForm
    return text


def _read(arguments: str) -> tuple[list[Any], dict[str, Any]]:
    forms = json.loads(arguments)
    return [decode(it) for it in forms["plain"]], {k: decode(v) for k, v in forms["named"].items()}


def _returns(call: Call) -> bool:
    try:
        return not {"raises", "timeout"} & describe_limited(prepare(call)[0]).keys()
    except BaseException:  # noqa: BLE001 - code under test raises anything, SystemExit too
        return False


def prepare(call: Call) -> tuple[Callable[[], Any], list[Any], dict[str, Any]]:
    """A call with arguments of its own."""
    plain, named = _read(call["arguments"])
    if call["on"] is not None:
        owner, _, name = call["function"].rpartition(".")
        built, others = _read(call["on"])
        function = getattr(find(owner)(*built, **others), name)
    else:
        function = find(call["function"])
    return lambda: function(*plain, **named), plain, named


def describe_limited(call: Callable[[], Any], seconds: float = _CALL_SECONDS) -> dict[str, Any]:
    """The result as a form, within processor time."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        return describe(call)
    except CallTimeout:
        return {"timeout": True}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def make_drawn_calls(request: dict, answer: str) -> None:
    """Writes what each call gives, does and takes, until the time is over."""
    signal.signal(signal.SIGVTALRM, expire)
    started = time.monotonic()
    with Path(answer).open("w") as file:
        for place, entry in enumerate(request["calls"]):
            random.seed(f"{request['luck']} {place}")
            line = (
                {"late": True} if time.monotonic() - started > request["seconds"] else _try(entry)
            )
            file.write(json.dumps(line) + "\n")
            file.flush()
        if request["worn"] is not None:
            file.write(json.dumps(_wear(request["worn"], request["repeats"])) + "\n")


def _try(entry: Call) -> dict[str, Any]:
    if "name" in entry:
        return {"takes": _takes(entry)}
    try:
        call, plain, named = prepare(entry)
        effects = Effects(tuple(plain), named)
        started = time.perf_counter()
        result = describe_limited(call)
        seconds = time.perf_counter() - started
        return {"result": result, "facts": sorted(effects.find()), "seconds": seconds}
    except BaseException as error:  # noqa: BLE001 - code under test raises anything, SystemExit too
        return {"result": {"raises": type(error).__name__}, "facts": [], "seconds": 0.0}


def _takes(entry: Call) -> str:
    """What is wrong with a name: gone, or it takes other arguments. Empty: nothing."""
    try:
        value = find(entry["name"])
    except (AttributeError, ImportError):
        return "is gone"
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return ""
    for count, names in entry["shapes"]:
        try:
            signature.bind(*[None] * count, **dict.fromkeys(names))
        except TypeError:
            return "takes other arguments"
    return ""


def _wear(entry: Call, repeats: int) -> dict[str, Any]:
    """What a call gives after many others, and by how many bytes memory grows with each."""
    _repeat(entry, repeats)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    num_traced = _repeat(entry, _TRACED)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"worn": _try(entry)["result"], "leaked": grown / max(1, num_traced)}


def _repeat(entry: Call, count: int) -> int:
    """Calls made within _WORN_SECONDS of processor time, whatever else runs on the machine, and ten times that in all."""
    ends = time.process_time() + _WORN_SECONDS, time.monotonic() + 10 * _WORN_SECONDS
    num_made = 0
    with contextlib.suppress(BaseException):
        while num_made < count and time.process_time() < ends[0] and time.monotonic() < ends[1]:
            describe_limited(prepare(entry)[0])
            num_made += 1
    return num_made
