"""Calls with random arguments, of one function that tests call and of all public names of a module. Runs in boxes,
standard library only.

`draw_calls` draws calls that return, in a box that has only the original. `make_drawn_calls` makes them, and writes
their results and effects and whether names still exist and accept the same arguments.
"""

import ast
import contextlib
import dis
import functools
import importlib
import inspect
import itertools
import json
import random
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from ostinato.infra.sandbox.inside.trials.effects import Effects
from ostinato.infra.sandbox.inside.trials.perturbation import vary_call, vary_value
from ostinato.infra.sandbox.inside.trials.repeated_calls import (
    describe_effect,
    describe_limited,
    digest_state,
    has_effect,
    measure_growth,
)
from ostinato.infra.sandbox.inside.trials.watched_calls import read_call_seconds
from ostinato.infra.sandbox.inside.value_forms import (
    MAX_TEXT,
    NotEncodable,
    decode,
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
_CHANGING = frozenset({"__setitem__", "__delitem__", "__iadd__", "__enter__"})
_TRIES, _MAX_KEPT = 40, 4  # calls tried and kept per function of a module
_MAX_OWN = 16  # calls kept of the problem's own method
_MAX_EARLIER = 4  # calls of other methods on its object before
_OBJECTS = 4  # per class
_VARIED = 3  # variations per known call
_FROM_POOL = 12  # further calls of the known function
_DRAW_SECONDS = 6.0
_MAX_REFUSED = 6  # calls of the problem's function that it refuses itself
_RAISE = dis.opmap["RAISE_VARARGS"]
_PROPERTIES = (property, functools.cached_property)
_SPECIAL = frozenset(
    {
        "__str__", "__len__", "__call__", "__repr__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
        "__getitem__", "__contains__", "__iter__", "__bool__", "__add__", "__sub__", "__mul__",
    }
)  # fmt: skip
_UNKNOWN = inspect.Parameter("value", inspect.Parameter.POSITIONAL_ONLY)
Call = dict[str, Any]


def draw_calls(request: dict, answer: str) -> None:
    """Writes calls that return, calls that the problem's function refuses itself, and names with the shapes of the
    calls that they accept.
    """
    signal.signal(signal.SIGVTALRM, expire)
    rng = random.Random(request["order"])
    ends = time.monotonic() + _DRAW_SECONDS
    num_refused = 0
    with Path(answer).open("w") as file:
        for call in _draw(request, rng):
            if time.monotonic() > ends:
                return
            is_own = call.get("function") == request["function"] != ""
            if "name" in call or "arguments" not in call or _returns(call):
                shown = {**call, "has_effect": has_effect(_effect_of(call))} if is_own else call
            elif is_own and num_refused < _MAX_REFUSED and _is_refused(call, request["root"]):
                num_refused += 1
                shown = {**call, "is_refused": True}
            else:
                continue
            file.write(json.dumps(shown) + "\n")
            file.flush()


def _draw(request: dict, rng: random.Random) -> Iterator[Call]:
    if request["has_shape"]:
        with contextlib.suppress(Exception):
            name = request["function"]
            yield {"name": name, "shapes": list(_shapes(find(name)))}
    if request["known"]:
        yield from _vary_known(request["known"], rng)
        function = find(request["known"][0]["function"])
        for arguments in _guesses(function, 0, rng, _FROM_POOL):
            yield {"function": request["known"][0]["function"], "on": None, "arguments": arguments}
    elif request["function"]:  # tests call it only with objects, or as a method
        with contextlib.suppress(Exception):
            name = request["function"]
            module = name.partition(":")[0]
            found = _calls_of(
                name,
                int(_is_method(name)),
                rng,
                lambda call: _returns(call) or _is_refused(call, request["root"]),
                [
                    f"{module}:{item}"
                    for home, left in request["modules"]
                    if home == module
                    for item in left
                ],
            )
            yield from (call for call in found if "function" in call)
    for module, left_out in request["modules"]:
        with contextlib.suppress(Exception):
            for name, skipped in _public_names(importlib.import_module(module), left_out):
                yield from _calls_of(f"{module}:{name}", skipped, rng)
            for name in _public_data(importlib.import_module(module)):
                yield {"function": f"{module}:{name}", "on": None}


def _is_method(name: str) -> bool:
    """Whether a function is called on an object of a class."""
    owner, _, last = name.rpartition(".")
    return ":" in owner and type(inspect.getattr_static(find(owner), last)) is FunctionType


def _vary_known(known: list[Call], rng: random.Random) -> Iterator[Call]:
    for call in known:
        yield call
        for _ in range(_VARIED):
            plain, named = _read(call["arguments"])
            with contextlib.suppress(NotEncodable, RecursionError):
                yield {**call, "arguments": _text(*vary_call(tuple(plain), named, 0, rng))}


def _public_names(module: Any, left_out: list[str]) -> Iterator[tuple[str, int]]:
    """Public functions, classes and attributes of classes, each with the number of implicit leading parameters."""
    for name, value in list(vars(module).items()):
        is_own = inspect.getmodule(value) is module
        if name.startswith("_") or not is_own or not callable(value):
            continue
        yield from [] if name in left_out else [(name, 0)]
        for inner, member in list(vars(value).items()) if isinstance(value, type) else ():
            is_public = not inner.startswith("_") or inner in _SPECIAL
            is_bare = isinstance(member, (staticmethod, classmethod))
            is_code = callable(member) or is_bare or isinstance(member, _PROPERTIES)
            if is_public and is_code and f"{name}.{inner}" not in left_out:
                yield f"{name}.{inner}", int(not is_bare and hasattr(type(member), "__get__"))


def _public_data(module: Any) -> Iterator[str]:
    """Public names of plain data that a module defines, and that its classes have."""
    assigned = {
        item.id
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for item in ast.walk(node)
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    }
    for name, value in list(vars(module).items()):
        if name.startswith("_"):
            continue
        if name in assigned and _is_data(value):
            yield name
        is_own_class = isinstance(value, type) and inspect.getmodule(value) is module
        for inner, member in list(vars(value).items()) if is_own_class else ():
            if not inner.startswith("_") and _is_data(member):
                yield f"{name}.{inner}"


def _is_data(value: Any) -> bool:
    """Whether a value is plain data without callables, whose names a change may choose."""
    try:
        text = json.dumps(encode(value))
    except (NotEncodable, RecursionError, ValueError):
        return False
    return len(text) <= MAX_TEXT and '{"name":' not in text


def _calls_of(
    name: str,
    skipped: int,
    rng: random.Random,
    keeps: Callable[[Call], bool] | None = None,
    changed: Sequence[str] = (),
) -> Iterator[Call]:
    """A name with its shapes, and calls that `keeps` takes. None: those that return. With `keeps` also calls on objects
    on which other methods than the `changed` ones were called before.
    """
    value = find(name)
    most = _MAX_KEPT if keeps is None else _MAX_OWN
    yield {"name": name, "shapes": list(_shapes(value))}
    if not callable(value) and not isinstance(value, _PROPERTIES):
        return
    objects: Sequence[Call] = [{"on": None}]
    if skipped:
        owner = name.rpartition(".")[0]
        guesses = _guesses(find(owner), 0, rng, _TRIES)
        built = (it for it in guesses if _returns({"function": owner, "on": None, "arguments": it}))
        objects = [{"on": it} for it in itertools.islice(built, _OBJECTS)]
        if keeps is not None:
            used = [
                _with_earlier_calls(owner, it, {name, *changed}, rng) for it in objects * _OBJECTS
            ]
            objects += [it for it in used if it["earlier"]]
    num_kept = 0
    for number, arguments in enumerate(_guesses(value, skipped, rng, _TRIES) if objects else ()):
        # The first guess is tried on all objects: one object may refuse everything, and a method without
        # parameters has only one guess.
        for on in objects if number == 0 else (objects[number % len(objects)],):
            call = {"function": name, **on, "arguments": arguments}
            if num_kept < most and (keeps or _returns)(call):
                num_kept += 1
                yield call


def _with_earlier_calls(
    owner: str, made: Call, left_out: Collection[str], rng: random.Random
) -> Call:
    """An object on which up to _MAX_EARLIER other public methods of its class were called, those that return."""
    names = [
        name
        for name, member in vars(find(owner)).items()
        if type(member) is FunctionType and f"{owner}.{name}" not in left_out
        if not name.startswith("_") or name in _CHANGING
    ]
    earlier: list[tuple[str, str]] = []
    for name in rng.choices(names, k=rng.randint(1, _MAX_EARLIER)) if names else ():
        arguments = next(_guesses(find(f"{owner}.{name}"), 1, rng, 1), None)
        call = {"function": f"{owner}.{name}", **made, "earlier": earlier, "arguments": arguments}
        if arguments is not None and _returns(call):
            earlier = [*earlier, (name, arguments)]
    return {**made, "earlier": earlier}


def _signature_of(value: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(value)
    except (ValueError, TypeError):
        return None


def _shapes(value: Any) -> Iterator[tuple[int, list[str]]]:
    """Calls that a signature accepts, as numbers of positional arguments and names of keyword arguments."""
    signature = _signature_of(value)
    if signature is None:
        return
    parameters = [*signature.parameters.values()]
    named = [it for it in parameters if it.kind is it.KEYWORD_ONLY and it.default is it.empty]
    plain = [it for it in parameters if it.kind in (it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD)]
    required = [it.name for it in named]
    yield sum(it.default is it.empty for it in plain), required
    yield len(plain), required
    fixed = [it for it in plain if it.kind is it.POSITIONAL_ONLY]
    others = [
        it.name for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)
    ]
    yield (len(fixed) or 1, others[1:]) if not fixed and plain else (len(fixed), others)


def _guesses(function: Any, skipped: int, rng: random.Random, count: int) -> Iterator[str]:
    """Random arguments that follow annotations and defaults, else any plain data."""
    signature = _signature_of(function)
    # Some classes have no signature, such as subclasses of str.
    parameters = [*signature.parameters.values()][skipped:] if signature else [_UNKNOWN][skipped:]
    wanted = [it for it in parameters if it.kind in (it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD)]
    named = [it for it in parameters if it.kind is it.KEYWORD_ONLY]
    num_least = sum(it.default is it.empty for it in wanted) if signature else 0
    seen: set[str] = set()
    for _ in range(count if parameters else 1):
        num_given = num_least if rng.random() < 0.6 else rng.randint(num_least, len(wanted))
        plain = [_guess(it, rng) for it in wanted[:num_given]]
        with contextlib.suppress(NotEncodable, RecursionError):
            given = [it for it in named if it.default is it.empty or rng.random() < 0.4]
            text = _text(tuple(plain), {it.name: _guess(it, rng) for it in given})
            if text not in seen:
                seen.add(text)
                yield text


def _guess(parameter: inspect.Parameter, rng: random.Random) -> Any:
    kind = str(parameter.annotation).removeprefix("<class '").partition("'")[0].partition("[")[0]
    if kind in _BY_NAME and rng.random() < 0.9:
        return vary_value(_BY_NAME[kind], rng)
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
        raise NotEncodable
    return text


def _read(arguments: str) -> tuple[list[Any], dict[str, Any]]:
    forms = json.loads(arguments)
    return [decode(it) for it in forms["plain"]], {k: decode(v) for k, v in forms["named"].items()}


def _returns(call: Call) -> bool:
    """Whether a call returns and does not ignore its arguments."""
    try:
        has_returned = not {"raises", "timeout"} & describe_limited(prepare(call)[0]).keys()
        return has_returned and not (call["on"] is None and _drops_arguments(call))
    except BaseException:  # noqa: BLE001 - code under test may raise anything, even SystemExit
        return False


def _is_refused(call: Call, root: str) -> bool:
    """Whether a call ends at a `raise` statement of the repository, which is part of what callers rely on."""
    raised: list[Exception] = []

    def ask() -> Any:
        try:
            return prepare(call)[0]()
        except (AssertionError, NotImplementedError):
            raise
        except Exception as error:
            raised.append(error)
            raise

    with contextlib.suppress(BaseException):  # code under test may raise anything
        describe_limited(functools.partial(ask))
        place: Any = raised[0].__traceback__
        while place.tb_next is not None:
            place = place.tb_next
        code = place.tb_frame.f_code
        return code.co_filename.startswith(f"{root}/") and code.co_code[place.tb_lasti] == _RAISE
    return False


def _drops_arguments(call: Call) -> bool:
    """Whether a class without a signature ignores its arguments. A subclass of tzinfo accepts any arguments, until it
    gets a second base.
    """
    made, plain, named = prepare(call)
    if not isinstance(made.func, type) or not (plain or named) or _signature_of(made.func):
        return False
    with contextlib.suppress(Exception):
        return digest_state([made()]) == digest_state([made.func()])
    return False


def prepare(call: Call) -> tuple[functools.partial[Any], list[Any], dict[str, Any]]:
    """A call on newly built arguments, with its positional and named arguments."""
    if "arguments" not in call:
        return functools.partial(find, call["function"]), [], {}
    plain, named = _read(call["arguments"])
    if call["on"] is not None:
        owner, _, name = call["function"].rpartition(".")
        built, others = _read(call["on"])
        made = find(owner)(*built, **others)
        for earlier, text in call.get("earlier", ()):
            plain_before, named_before = _read(text)
            describe_limited(
                functools.partial(getattr(made, earlier), *plain_before, **named_before)
            )
        if isinstance(inspect.getattr_static(type(made), name, None), _PROPERTIES):
            return functools.partial(getattr, made, name), [], {}
        function = getattr(made, name)
    else:
        function = find(call["function"])
    return functools.partial(function, *plain, **named), plain, named


def make_drawn_calls(request: dict, answer: str) -> None:
    """Writes result, effects and time of each call, or whether a name still accepts its calls, until the time is up."""
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
            file.write(json.dumps(_repeat(request["worn"], request["repeats"])) + "\n")


def _try(entry: Call) -> dict[str, Any]:
    if "name" in entry:
        return {"takes": _takes(entry)}
    try:
        call, plain, named = prepare(entry)
        effects = Effects(tuple(plain), named)
        started = read_call_seconds()
        facts: set[str] = set()
        result = describe_limited(call, facts=facts)
        seconds = read_call_seconds() - started
        shown = {"result": result, "facts": sorted(facts | effects.find()), "seconds": seconds}
        shown |= {"is_refused": True} if entry.get("is_refused") else {}
        # For a call of the problem's function that returns nothing, the effect is the only sign of work.
        acts = {"has_effect": has_effect(_effect_of(entry))} if entry.get("has_effect") else {}
        return shown | acts
    except BaseException as error:  # noqa: BLE001 - code under test may raise anything, even SystemExit
        return {"result": {"raises": type(error).__name__}, "facts": [], "seconds": 0.0}


def _takes(entry: Call) -> str:
    """Whether a name is gone or takes other arguments, as text. Empty: neither."""
    try:
        value = find(entry["name"])
    except (AttributeError, ImportError):
        return "is gone"
    signature = _signature_of(value)
    if signature is None:
        return ""
    for count, names in entry["shapes"]:
        try:
            signature.bind(*[None] * count, **dict.fromkeys(names))
        except TypeError:
            return "takes other arguments"
    return ""


def _repeat(entry: Call, repeats: int) -> dict[str, Any]:
    """The result of a call after many repetitions, whether its effect is still the same, and the bytes by which memory
    grows per call.
    """
    before = _effect_of(entry)
    leaked = measure_growth(lambda: prepare(entry)[0], repeats)
    worn = _try(entry)["result"]
    return {"worn": worn, "stays": _effect_of(entry) == before, "leaked": leaked}


def _effect_of(entry: Call) -> dict[str, Any]:
    try:
        call, plain, named = prepare(entry)
        return describe_effect(call, [getattr(call.func, "__self__", None), plain, named])
    except BaseException as error:  # noqa: BLE001 - code under test may raise anything, even SystemExit
        return {"raises": type(error).__name__}
