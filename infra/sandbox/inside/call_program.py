"""Runs in a box as a program: notes the arguments that functions are called with while tests run,
calls functions with given arguments, or runs tests without their expectations, and notes the values.

Only literals, containers of them and importable callables have a form; a call with anything else is
left out. Standard library and pytest only. What this writes is read as data by the host, which
alone knows the results wanted.
"""

import builtins
import contextlib
import functools
import importlib
import json
import math
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_MAX_TEXT = 4_000
_MAX_ITEMS = 200
_MAX_DEPTH = 8
_MAX_OPENED = 40  # containers of a value that holds other objects too
_MAX_VALUES = 200  # of one test
_MAX_RETURNS = 40  # of one test
_GENERATES = 0x20 | 0x80 | 0x200  # flags of code that returns at each yield or await
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: every class that Python code makes
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_QUIET = ("-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore")  # of pytest
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_NAMES = {kind: name for name, kind in _CONTAINERS.items()}


class NoForm(Exception):
    """A value that cannot be written down."""


class CallTimeout(BaseException):
    """A call used more CPU time than it may."""


def _expire(number: int, frame: Any) -> None:
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
        return _find(content)
    return _CONTAINERS[kind](decode(item) for item in content)


def _name_of(value: Any) -> str:
    try:
        name = f"{value.__module__ or 'builtins'}:{value.__qualname__}"
        if _find(name) is value:
            return name
    except (AttributeError, ImportError, TypeError, ValueError):
        pass
    raise NoForm


def _find(name: str) -> Any:
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
    return form if len(json.dumps(form)) <= 10 * _MAX_TEXT else {"text": "long"}


def _form_or_text(value: Any, opened: Iterator[int]) -> Any:
    """The form of a value; what has none in it, as text. Sets are sorted: their order is that of addresses."""
    try:
        return encode(value)
    except (NoForm, RecursionError):
        kind = type(value)
    if kind in (*_NAMES, dict) and len(value) <= _MAX_ITEMS and next(opened, None) is not None:
        items = value.items() if kind is dict else value
        forms = [_form_or_text(item, opened) for item in items]
        return {kind.__name__: sorted(forms, key=json.dumps) if kind in (set, frozenset) else forms}
    return {"type": kind.__name__, "text": _ADDRESS.sub("0x", repr(value))[:_MAX_TEXT]}


class Notes:
    """Collects calls of wanted functions through the interpreter's profile hook."""

    def __init__(self, request: dict) -> None:
        self.calls: dict[str, list[str]] = {}
        self._root = request["root"] + "/"
        self._most = request["most"]
        self._wanted = {(path, line, name) for path, line, name in request["functions"]}

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        """The profile hook."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._root):
            return
        key = (code.co_filename[len(self._root) :], code.co_firstlineno, code.co_qualname)
        if key not in self._wanted:
            return
        name = f"{key[0]}:{key[2]}"
        known = self.calls.setdefault(name, [])
        if len(known) >= self._most:
            return
        with contextlib.suppress(NoForm, RecursionError, TypeError):
            text = json.dumps(_arguments(frame))
            if len(text) <= _MAX_TEXT and text not in known:
                known.append(text)


def _arguments(frame: Any) -> dict:
    code, values = frame.f_code, frame.f_locals
    num_plain = code.co_argcount
    num_named = num_plain + code.co_kwonlyargcount
    names = list(code.co_varnames[:num_named])
    extra = code.co_varnames[num_named : num_named + bool(code.co_flags & 4)]
    rest_at = num_named + len(extra)
    keywords = code.co_varnames[rest_at : rest_at + bool(code.co_flags & 8)]
    if set(values) - {*names, *extra, *keywords}:
        raise NoForm  # a generator that goes on
    plain = [encode(values[name]) for name in names[:num_plain]]
    plain += [encode(item) for name in extra for item in values[name]]
    named = {name: encode(values[name]) for name in names[num_plain:]}
    named |= {key: encode(item) for name in keywords for key, item in values[name].items()}
    return {"plain": plain, "named": named}


def record(request: dict, answer: str) -> None:
    """Run tests and write, function by function, the calls seen."""
    import pytest  # noqa: PLC0415 - not needed, and not there, when calls are made

    notes = Notes(request)
    place = [f"--rootdir={request['root']}", "-c", os.devnull]
    sys.setprofile(notes)
    try:
        pytest.main([*_QUIET, *place, *request["tests"]])
    finally:
        sys.setprofile(None)
    with Path(answer).open("w") as file:
        for name, calls in sorted(notes.calls.items()):
            file.write(json.dumps({"function": name, "calls": calls}) + "\n")


def make_calls(request: dict, answer: str) -> None:
    """Calls functions and writes each result at once, so that a crash loses only later ones."""

    signal.signal(signal.SIGVTALRM, _expire)
    with Path(answer).open("w") as file:
        for entry in request["calls"]:
            signal.setitimer(signal.ITIMER_VIRTUAL, request["call_seconds"])
            try:
                result = describe(lambda entry=entry: _call(entry))
            except CallTimeout:
                result = {"timeout": True}
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            file.write(json.dumps(result) + "\n")
            file.flush()


def _call(entry: dict) -> Any:
    arguments = json.loads(entry["arguments"])
    function = _find(entry["function"])
    plain = [decode(form) for form in arguments["plain"]]
    return function(*plain, **{name: decode(form) for name, form in arguments["named"].items()})


def kind_of(value: Any) -> str:
    """Name of a value's type, after "made" for a class of Python code: one that takes name and place of
    a built-in type is told from it.
    """
    kind = type(value)
    is_made = type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE
    try:
        name = "None" if value is None else _name_of(kind)
    except NoForm:
        name = "" if is_made else kind.__name__
    return f"made {name}" if is_made else name


class Returns:
    """Tells what kind of value each outermost call of one function returns, through the interpreter's
    profile hook.
    """

    def __init__(self, path: str, symbol: str, tell: Callable[[str], None]) -> None:
        self._path, self._symbol = path, symbol
        self._tell = tell
        self._depth = self._told = 0

    def begin(self) -> None:
        """A test begins."""
        self._depth = self._told = 0
        sys.setprofile(self)

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        """The profile hook."""
        code = frame.f_code
        if code.co_qualname != self._symbol or code.co_filename != self._path:
            return
        if code.co_flags & _GENERATES:
            return
        if event == "call":
            self._depth += 1
        elif event == "return":
            self._depth -= 1
            if self._depth == 0 and self._told < _MAX_RETURNS:
                self._told += 1
                self._tell(kind_of(argument))


class Perturbation:
    """Gives a function other arguments than its callers do, in tests that ask for it.

    A share of its outermost calls has one argument changed: numbers, texts and containers of them;
    what else a call brings, a method's object above all, stays. Equal calls in an equal order are changed alike
    in every process.
    """

    def __init__(self, path: str, symbol: str) -> None:
        self._path, self._symbol = path, symbol
        self._rng = random.Random()
        self._share = 0.0
        self._depth = 0

    def begin(self, seed: str, share: float) -> None:
        """A test begins, in which so many of the calls are changed."""
        self._rng = random.Random(seed)
        self._share = share
        self._depth = 0

    def install(self) -> None:
        """Stands in the function's place wherever imported modules name it. A property stays."""
        modules = [module for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
        owner: Any = next((m for m in modules if getattr(m, "__file__", "") == self._path), None)
        *classes, name = self._symbol.split(".")
        for part in classes:
            owner = vars(owner).get(part) if isinstance(owner, (type, ModuleType)) else None
        found = vars(owner).get(name) if isinstance(owner, (type, ModuleType)) else None
        kind = type(found) if isinstance(found, (staticmethod, classmethod)) else None
        function = found if kind is None else found.__func__  # type: ignore[union-attr]
        if not callable(function) or isinstance(function, type):
            return
        wrapper = self._wrap(function, int(bool(classes) and kind is not staticmethod))
        if classes:
            setattr(owner, name, wrapper if kind is None else kind(wrapper))
            return
        for module in modules:
            for key in [key for key, value in vars(module).items() if value is found]:
                setattr(module, key, wrapper)

    def _wrap(self, function: Callable, num_kept: int) -> Callable:
        @functools.wraps(function)
        def called(*plain: Any, **named: Any) -> Any:
            if self._depth == 0 and self._rng.random() < self._share:
                plain, named = _vary_call(plain, named, num_kept, self._rng)
            self._depth += 1
            try:
                return function(*plain, **named)
            finally:
                self._depth -= 1

        return called


def _vary_call(
    plain: tuple[Any, ...], named: dict[str, Any], num_kept: int, rng: random.Random
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    places: list[Any] = [*range(num_kept, len(plain)), *named]
    if not places:
        return plain, named
    place = rng.choice(places)
    if isinstance(place, str):
        return plain, {**named, place: vary_value(named[place], rng)}
    return (*plain[:place], vary_value(plain[place], rng), *plain[place + 1 :]), named


def vary_value(value: Any, rng: random.Random) -> Any:
    """A value of the same type near the given one. One that is no plain data stays."""
    kind = type(value)
    if kind is bool:
        return not value
    if kind is int:
        return value + rng.choice((-2, -1, 1, 2, 7))
    if kind is float:
        return value * rng.choice((0.5, 1.5, -1.0))
    if kind is str and value:
        place = rng.randrange(len(value))
        near = chr(max(1, min(ord(value[place]) + rng.choice((-2, -1, 1, 2)), 0xD7FF)))
        ways = (value[:place] + near + value[place + 1 :], value[:place] + value[place + 1 :])
        return rng.choice((*ways, value[::-1], value.swapcase(), value + value[place]))
    if kind in (list, tuple) and value:
        place = rng.randrange(len(value))
        items = [*value[:place], vary_value(value[place], rng), *value[place + 1 :]]
        return kind(items)
    if kind is dict and value:
        key = rng.choice(list(value))
        return {**value, key: vary_value(value[key], rng)}
    return value


class Observer:
    """A pytest plugin, and what tests whose expectations were taken out call with their values."""

    def __init__(self, request: dict, file: Any) -> None:
        self._request = request
        self._file = file
        self._test = ""
        self._room = _MAX_VALUES
        self._returns: Returns | None = None
        self._perturbation: Perturbation | None = None
        if request["function"] is not None:
            path, symbol = request["function"]
            place = f"{request['root']}/{path}"
            self._perturbation = Perturbation(place, symbol)
            self._returns = Returns(place, symbol, lambda kind: self._add("returned", kind))

    def observe(self, *values: Any) -> None:
        """Write values down."""
        self._note("values", [describe_text(value) for value in values])

    @contextlib.contextmanager
    def catch(self, with_text: bool = False) -> Iterator[Any]:
        """Note the type of the exception that a block ends in, perhaps its text, and go on."""
        caught = Caught()
        try:
            yield caught
        except Exception as error:  # noqa: BLE001 - code under test raises anything
            caught.value = caught.exception = error
            caught.type = type(error)
        shown = [caught.type.__name__] if caught.type else []
        if shown and with_text:
            shown.append(describe_text(str(caught.value)))
        self._note("caught", shown)

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Keep the tests wanted, of a parametrized one a few, in an order drawn by the host. Where the host
        names those of an earlier run, exactly them: ids that count the cases of a set are chance.
        """
        rng = random.Random(self._request["order"])
        chosen = frozenset(self._request["chosen"])
        by_name: dict[str, list] = {}
        for item in items:
            by_name.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = []
        for name in sorted(by_name.keys() & set(self._request["tests"])):
            # by parameters: those of a set come in an order that addresses decide
            found = list(enumerate(sorted(by_name[name], key=_show_parameters)))
            for position, item in found:
                item.observed_name = f"{name}#{position}"
            named = [pair for pair in found if pair[1].nodeid in self._request["instances"]]
            others = [pair for pair in found if pair not in named]
            most = max(0, self._request["most"] - len(named))
            drawn = [*named, *rng.sample(others, min(len(others), most))]
            if chosen:
                drawn = [pair for pair in found if pair[1].observed_name in chosen]
            kept += [item for _, item in sorted(drawn, key=lambda pair: pair[0])]
        rng.shuffle(kept)
        items[:] = kept
        if self._perturbation is not None:  # all modules are imported
            self._perturbation.install()

    def pytest_runtest_setup(self, item: Any) -> None:
        """A test begins."""
        self._test, self._room = item.observed_name, _MAX_VALUES
        random.seed(f"{self._request['luck']} {self._test}")
        signal.setitimer(signal.ITIMER_VIRTUAL, self._request["test_seconds"])
        if self._perturbation is not None:
            share = self._request["perturbed"].get(self._test.partition("::")[0], 0.0)
            self._perturbation.begin(f"{self._request['order']} {self._test}", share)
        if self._returns is not None:
            self._returns.begin()

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """A test's setup, call or teardown ended."""
        if call.when == "call" or call.excinfo is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            sys.setprofile(None)
            self._add("ended", "" if call.excinfo is None else call.excinfo.type.__name__)

    def _add(self, kind: str, content: Any) -> None:
        """Notes what takes no room from the values of a test."""
        self._room += 1
        self._note(kind, content)

    def _note(self, kind: str, content: Any) -> None:
        if self._room > 0:
            self._room -= 1
            self._file.write(json.dumps({"test": self._test, kind: content}) + "\n")
            self._file.flush()


def _show_parameters(item: Any) -> str:
    """The parameters of an instance of a test as text."""
    held = vars(item).get("callspec")
    return "" if held is None else json.dumps([describe_text(it) for it in held.params.values()])


class Caught:
    """Stands for the exception information of pytest.raises and of assertRaises."""

    value: Any = None
    exception: Any = None
    type: Any = None

    def match(self, *_: Any) -> bool:
        """Whatever the text is."""
        return True


def describe_text(value: Any) -> Any:
    """The form of a value, or the type of the exception that its own methods end in."""
    try:
        return _describe_value(value)
    except Exception as error:  # noqa: BLE001 - code under test raises anything
        return {"unreadable": type(error).__name__}


def observe_tests(request: dict, answer: str) -> None:
    """Run tests whose expectations were taken out and write each value they look at."""
    import pytest  # noqa: PLC0415 - not needed, and not there, when calls are made

    signal.signal(signal.SIGVTALRM, _expire)
    place = [f"--rootdir={request['root']}", "-c", os.devnull, "--import-mode=prepend"]
    # a literal that was changed may break the import of one copy
    place += ["--continue-on-collection-errors", "--assert=plain", "--capture=sys"]
    with Path(answer).open("w") as file:
        observer = Observer(request, file)
        builtins.__dict__.update(__observe__=observer.observe, __catch__=observer.catch)
        files = [f"{request['root']}/{path}" for path in request["files"]]
        pytest.main([*_QUIET, *place, *files], plugins=[observer])


def main(mode: str, request_file: str, answer: str) -> None:
    """Record, call or observe, as the first word says."""
    request = json.loads(Path(request_file).read_text())
    sys.path.insert(0, request["root"])
    modes = {"record": record, "call": make_calls, "observe": observe_tests}
    modes[mode](request, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
