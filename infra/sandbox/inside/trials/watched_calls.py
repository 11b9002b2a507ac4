"""Watches the calls of one function, however its callers refer to it. Runs in boxes, standard library only.

`WatchedCalls` changes the function object itself, so that tables, registries, partials, default arguments and closures
that took it during imports hold the watched function. It can change the arguments of a call. As facts it notes what a
caller can see besides the value: the type returned, changed arguments, output and changes of the process state.
"""

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import inspect
import json
import operator
import random
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Generator, Iterator
from types import (
    CellType,
    CodeType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    ModuleType,
    NoneType,
)
from typing import Any

from ostinato.infra.sandbox.inside.cpu_waits import read_waited_seconds
from ostinato.infra.sandbox.inside.trials.effects import Effects
from ostinato.infra.sandbox.inside.trials.perturbation import vary_call
from ostinato.infra.sandbox.inside.trials.repeated_calls import KeptCalls, make_again
from ostinato.infra.sandbox.inside.value_forms import (
    MAX_TEXT,
    NotEncodable,
    encode,
    is_builtin_iterator,
    kind_of,
    kinds_in,
    note_silence,
)

Places = list[tuple[str, str]]  # module and name in it, dotted for a method
_MAX_CALLS = 24  # calls that are noted with their arguments
_MAX_EFFECTS = 40  # calls of one test whose effects are measured
_MAX_NESTING = 3  # of nested tuples that hold a function
_wall = time.perf_counter  # bound before code under test can replace it


def read_call_seconds() -> float:
    """Wall time minus the time for which this process waited for a CPU, so that load on the machine makes no call
    look slow, and no original so slow that a slow change passes.
    """
    return _wall() - read_waited_seconds()


_COPIED_ATTRIBUTES = ("cache_clear", "cache_info", "cache_parameters", "register", "dispatch")


class WatchedCalls:
    """The watched function of one symbol.

    In a share of its outermost calls, one argument is changed: a number, text, date or time, match, or a
    container of those. Other arguments, in particular a method's object, are not changed. Equal calls in equal
    order are changed in the same way in every process.
    """

    def __init__(self, path: str, symbol: str, kept: KeptCalls, num_worn: int = 0) -> None:
        """`num_worn`: how often the first call that returns is made again, on its own arguments."""
        self._num_worn = num_worn
        self._path, self._symbol = path, symbol
        self._kept = kept
        self._test = ""
        self._rng = random.Random()
        self._share = 0.0
        self._depth = self._num_calls = 0
        # by id: an object that callers hold, which this keeps alive, and the watched object that replaces it
        self._watched: dict[int, tuple[Any, Any]] = {}
        self.facts: set[str] = set()
        self.seconds: list[float] = []
        self.calls: list[str] = []  # distinct arguments that are only plain data

    def begin(self, seed: str, share: float) -> None:
        """Starts a test. `share` (0..1) of its calls, drawn with `seed`, are changed."""
        self._test = seed
        self._rng = random.Random(seed)
        self._share = share
        self._depth = self._num_calls = 0
        self.facts = set()

    def repeat(self, repeats: int) -> dict[str, Any] | None:
        """Measurements of a kept call that is repeated. None: no call was kept."""
        self._depth += 1  # so that calls inside it are not watched
        return self._kept.repeat(repeats)

    @property
    def copied(self) -> list[str]:
        """Places of the calls copied so far."""
        return self._kept.copied

    @property
    def median_seconds(self) -> float:
        """Median time of the outermost calls so far. 0: there was none."""
        return statistics.median(self.seconds) if self.seconds else 0.0

    def install_at_import(self, places: Places) -> None:
        """Installs the watch as soon as the module is imported, before other modules use the function."""

        def watch(effects: Effects) -> None:
            self.facts |= effects.find()
            self.install(places or self.find_places())

        sys.meta_path.insert(0, _ImportHook(self._path, watch))

    def find_places(self) -> Places:
        """Names by which imported modules refer to the function."""
        modules = _modules()
        homes = [name for name, names in modules.items() if names.get("__file__") == self._path]
        if not homes or "." in self._symbol:
            return [(home, self._symbol) for home in homes[:1]]
        found = modules[homes[0]].get(self._symbol)
        if isinstance(found, (type, NoneType)):
            return []
        bindings = ((module, *pair) for module, names in modules.items() for pair in names.items())
        return [(module, name) for module, name, value in bindings if value is found]

    def install(self, places: Places) -> None:
        """Replaces the callables at the given places by watched ones. Other objects stay."""
        for module, dotted in places:
            *classes, name = dotted.split(".")
            owner: Any = sys.modules.get(module)
            for part in classes:
                owner = inspect.getattr_static(owner, part, None)
            found = inspect.getattr_static(owner, name, None) if owner is not None else None
            if found is None or (classes and not isinstance(owner, type)):
                continue
            if id(found) not in self._watched:
                holders = [] if classes else gc.get_referrers(found)
                made = self._watch(found, owner, name, places)
                self._watched |= {id(item): (item, made) for item in (found, made)}
                _replace(found, made, holders)
            if (made := self._watched[id(found)][1]) is not found:
                setattr(owner, name, made)

    def _watch(self, found: Any, owner: Any, name: str, places: Places) -> Any:
        """The watched replacement for an attribute of a module or class. For a function, the attribute itself."""
        inner, num_kept = _function_of(found, owner, name)
        if type(inner) is FunctionType and name in vars(owner):
            self._watch_in_place(inner, num_kept, places)
            return found
        is_partial = type(found) is functools.partial and not (found.args or found.keywords)
        if is_partial and type(found.func) is FunctionType:  # the partial keeps the function object
            self._watch_in_place(found.func, num_kept, places)
            return found
        if isinstance(found, functools.partialmethod):
            inner = found.__get__(None, owner)
        if not callable(inner):
            return found
        made = self._wrap(inner, num_kept, name)
        if isinstance(found, (staticmethod, classmethod)):
            return type(found)(made)
        if type(found) is property:
            return property(made, found.fset, found.fdel, found.__doc__)
        if isinstance(found, functools.cached_property):
            cached = functools.cached_property(made)
            cached.__set_name__(owner, name)
            return cached
        return staticmethod(made) if isinstance(owner, type) and not num_kept else made

    def _watch_in_place(self, function: FunctionType, num_kept: int, places: Places) -> None:
        """Makes the function object call a watched copy of itself. Names at other places get an unwatched copy."""
        copy = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
        vars(copy).update(vars(function))
        for module, names in _modules().items():
            for name in [name for name, value in names.items() if value is function]:
                if (module, name) not in places:
                    names[name] = copy
        called = self._wrap(copy, num_kept)
        vars(function).setdefault("__wrapped__", copy)  # where inspect finds the signature
        named = function.__code__
        passing = _passing_code(len(named.co_freevars))
        function.__code__ = passing.replace(
            co_consts=tuple(called if it == "called" else it for it in passing.co_consts),
            co_freevars=named.co_freevars,
            co_name=named.co_name,
            co_qualname=named.co_qualname,
        )

    def _wrap(self, function: Callable, num_kept: int, name: str = "") -> Callable:
        @functools.wraps(function)
        def called(*plain: Any, **named: Any) -> Any:
            if self._depth:
                return function(*plain, **named)
            if self._rng.random() < self._share:
                plain, named = vary_call(plain, named, num_kept, self._rng)
            if not num_kept and len(self.calls) < _MAX_CALLS:
                self._note_call(plain, named)
            self._depth += 1  # copying an object may call the function
            self._kept.offer(f"{self._test} {self._num_calls}", function, plain, named)
            self._depth -= 1
            value = self._observe(function, plain, named)
            if self._num_worn and threading.current_thread() is threading.main_thread():
                count, self._num_worn = self._num_worn, 0
                self._depth += 1
                make_again(function, plain, named, count)
                self._depth -= 1
            return value

        if name:
            called.__name__, called.__qualname__ = name, self._symbol
            for extra in (extra for extra in _COPIED_ATTRIBUTES if hasattr(function, extra)):
                setattr(called, extra, operator.attrgetter(extra)(function))
        return called

    def _note_call(self, plain: tuple[Any, ...], named: dict[str, Any]) -> None:
        with contextlib.suppress(NotEncodable, RecursionError):
            forms = {key: encode(value) for key, value in named.items()}
            text = json.dumps({"plain": [encode(value) for value in plain], "named": forms})
            if len(text) <= MAX_TEXT and text not in self.calls:
                self.calls.append(text)

    def _observe(self, function: Callable, plain: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._num_calls += 1
        effects = None
        if self._num_calls <= _MAX_EFFECTS:
            effects = Effects(plain, named, is_method="." in self._symbol)
        self._depth += 1
        started = read_call_seconds()
        try:
            value = function(*plain, **named)
        except Exception as error:
            note_silence(error, self.facts)
            raise
        finally:
            self._depth -= 1
            self.seconds.append(read_call_seconds() - started)
            if effects is not None:
                self.facts |= effects.find()
        if effects is not None:
            self.facts.add(f"returns {kind_of(value)}")
            self._note_items(value)
        if type(value) is CoroutineType:
            return self._await(value, effects, len(self.seconds) - 1)
        return self._relay(value, effects) if is_builtin_iterator(value) else value

    def _note_items(self, value: Any) -> None:
        """Notes the kinds of what a result holds, since an object that equals everything may hide in it."""
        self.facts |= {f"returns item {kind}" for kind in kinds_in(value)}

    async def _await(self, steps: Any, effects: Effects | None, place: int) -> Any:
        """The result of a coroutine. Time spent between its waits counts as time inside the call."""
        value = await types.coroutine(self._step)(steps, effects, place)
        if effects is not None:
            self._note_items([value])
        return value

    def _relay(self, steps: Any, effects: Effects | None) -> Iterator[Any]:
        """Yields the items. Time spent computing them counts as time inside the call."""
        place = len(self.seconds) - 1
        noted = self._note_items if effects is not None else None
        return (yield from self._step(steps, effects, place, noted))

    def _step(
        self,
        steps: Any,
        effects: Effects | None,
        place: int,
        note: Callable[[list[Any]], None] | None = None,
    ) -> Generator[Any, Any, Any]:
        """Passes on the items of an iterator or the waits of a coroutine."""
        is_coroutine, is_ended = type(steps) is CoroutineType, False
        ask = functools.partial(*((steps.send, None) if is_coroutine else (next, steps)))
        while True:
            self._depth += 1
            started = read_call_seconds()
            try:
                item = ask()
            except StopIteration as end:
                is_ended = True
                return end.value
            except Exception as error:
                note_silence(error, self.facts)
                raise
            finally:
                self._depth -= 1
                self.seconds[place] += read_call_seconds() - started
                if effects is not None:
                    self.facts |= effects.find(is_ended=is_ended and not is_coroutine)
            if note is not None:
                note([item])
            try:
                sent = yield item
                is_plain = sent is None and not is_coroutine
                ask = functools.partial(*((next, steps) if is_plain else (steps.send, sent)))
            except GeneratorExit:
                if isinstance(steps, (GeneratorType, CoroutineType)):
                    steps.close()
                raise
            except BaseException as error:  # noqa: BLE001 - thrown in by the caller
                ask = functools.partial(steps.throw, error)


class _ImportHook(importlib.abc.MetaPathFinder):
    """Runs a function with the effects of the import after the module of one file was imported."""

    def __init__(self, path: str, then: Callable[[Effects], None]) -> None:
        self._path, self._then = path, then
        base = path.removesuffix(".py").removesuffix("/__init__")
        self._name = base.rpartition("/")[2]

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The specification of the wanted module. None for others, which the next finders find."""
        if fullname.rpartition(".")[2] != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin != self._path or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            effects = Effects((), {})
            execute(module)
            self._then(effects)

        vars(spec.loader)["exec_module"] = execute_and_watch
        return spec


def _modules() -> dict[str, dict[str, Any]]:
    return {k: vars(m) for k, m in list(sys.modules.items()) if isinstance(m, ModuleType)}


def _function_of(found: Any, owner: Any, name: str) -> tuple[Any, int]:
    """The callable of an attribute of a module or class, and the number of implicit leading arguments."""
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__, int(isinstance(found, classmethod))
    if isinstance(found, (property, functools.cached_property)):
        return getattr(found, "fget", None) or getattr(found, "func", None), 1
    is_descriptor = isinstance(owner, type) and hasattr(type(found), "__get__")
    if is_descriptor and not callable(
        found
    ):  # of a repository's own class, which keeps the function somewhere
        held = gc.get_referents(found)
        held += [value for names in held if type(names) is dict for value in names.values()]
        named = [it for it in held if type(it) is FunctionType and it.__name__ == name]
        return (named[0] if named else found), 1
    return found, int(is_descriptor)


@functools.cache
def _passing_code(num_cells: int) -> CodeType:
    """Code that passes its arguments on, for a function whose closure has `num_cells` cells.

    `_watch_in_place` replaces its constant "called" by the callee. The code names the cells without using them: only
    code with free variables copies the cells into its frame, and reading `f_locals` of a frame without them makes
    Python end with a segmentation fault.
    """
    cells = "".join(f"cell{number}, " for number in range(num_cells))
    made: dict[str, Any] = {}
    text = (
        f"def close({cells}):\n def pass_on(*plain, **named):\n  if False: ({cells})\n"
        "  called = 'called'\n  return called(*plain, **named)\n return pass_on\n"
    )
    exec(text, made)  # this module's own text
    return made["close"](*[None] * num_cells).__code__


def _replace(found: Any, made: Any, holders: list[Any], nesting: int = 0) -> None:
    """Replaces an object in the containers that hold it, except in modules, where `install` replaces it."""
    for holder in holders if made is not found else ():
        if isinstance(holder, list):
            holder[:] = [made if item is found else item for item in holder]
        elif isinstance(holder, dict):
            _replace_attributes(holder, found, made)
        elif isinstance(holder, CellType):
            holder.cell_contents = made
        elif isinstance(holder, FunctionType):
            holder.__defaults__ = made if holder.__defaults__ is found else holder.__defaults__
        elif isinstance(holder, (staticmethod, classmethod)):
            holder.__init__(made)
        elif isinstance(holder, functools.partial):
            state: Any = holder.__reduce__()
            holder.__setstate__((made, *state[2][1:]))  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(holder, tuple) and nesting < _MAX_NESTING:
            items = (made if item is found else item for item in holder)
            other = tuple.__new__(type(holder), items)  # a named tuple as well
            _replace(holder, other, gc.get_referrers(holder), nesting + 1)
        elif hasattr(holder, "__dict__") and not isinstance(holder, (type, ModuleType)):
            _replace_attributes(vars(holder), found, made)


def _replace_attributes(names: dict[Any, Any], found: Any, made: Any) -> None:
    classes = [item for item in gc.get_referrers(names) if isinstance(item, type)]
    for name in [name for name, value in names.items() if value is found]:
        if classes:
            setattr(classes[0], name, made)
        elif "__spec__" not in names:
            names[name] = made
