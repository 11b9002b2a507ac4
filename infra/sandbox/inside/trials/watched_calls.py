"""Calls of one function, watched at the names by which callers reach it. Runs in boxes, standard library only.

`WatchedCalls` stands at those names, whatever is bound there: a function, a lambda, a partial, a method of a base
class. It can change the arguments of a call, and notes as facts what a caller sees beside the value: the kind
that comes back, changed arguments, output, changed surroundings.
"""

import contextlib
import functools
import inspect
import json
import operator
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import GeneratorType, ModuleType, NoneType
from typing import Any

from ostinato.infra.sandbox.inside.trials.perturbation import vary_call
from ostinato.infra.sandbox.inside.value_forms import (
    MAX_TEXT,
    NoForm,
    describe_text,
    encode,
    is_builtin_iterator,
    kind_of,
)

Places = list[tuple[str, str]]  # module and name in it, dotted for a method
_MAX_CALLS = 24  # that are noted with their arguments
_MAX_LOOKED_AT = 40  # calls of one test whose effects are looked at
_MUTABLE = (list, dict, set, bytearray)


class WatchedCalls:
    """The function of one symbol.

    A share of its outermost calls has one argument changed: a number, text, date or time, match, or a
    container of those. Other arguments, above all a method's object, stay. Equal calls in an equal order
    are changed alike in every process.
    """

    def __init__(self, path: str, symbol: str) -> None:
        self._path, self._symbol = path, symbol
        self._rng = random.Random()
        self._share = 0.0
        self._depth = self._num_calls = 0
        self._wrapped: dict[
            int, tuple[Any, Any]
        ] = {}  # what was found, kept alive, and its wrapper
        self.facts: set[str] = set()
        self.seconds: list[float] = []
        self.calls: list[
            str
        ] = []  # arguments of different calls of a function with plain data alone

    def begin(self, seed: str, share: float) -> None:
        """Begins a test: `share` (0..1) of its calls is changed, drawn with `seed`."""
        self._rng = random.Random(seed)
        self._share = share
        self._depth = self._num_calls = 0
        self.facts = set()

    @property
    def median_seconds(self) -> float:
        """Median time of an outermost call so far. 0 when there was none."""
        return statistics.median(self.seconds) if self.seconds else 0.0

    def find_places(self) -> Places:
        """Where imported modules name the function."""
        modules = {k: m for k, m in list(sys.modules.items()) if isinstance(m, ModuleType)}
        homes = [k for k, m in modules.items() if vars(m).get("__file__") == self._path]
        if not homes or "." in self._symbol:
            return [(home, self._symbol) for home in homes[:1]]
        found = vars(modules[homes[0]]).get(self._symbol)
        if isinstance(found, (type, NoneType)):
            return []
        return [
            (module, name)
            for module, held in modules.items()
            for name, value in list(vars(held).items())
            if value is found
        ]

    def install(self, places: Places) -> None:
        """Stands in at the given places. What nobody can call stays."""
        for module, dotted in places:
            *classes, name = dotted.split(".")
            owner: Any = sys.modules.get(module)
            for part in classes:
                owner = inspect.getattr_static(owner, part, None)
            found = inspect.getattr_static(owner, name, None) if owner is not None else None
            if found is None or (classes and not isinstance(owner, type)):
                continue
            if id(found) not in self._wrapped:
                self._wrapped[id(found)] = found, self._stand_in(found, owner, name)
            wrapper = self._wrapped[id(found)][1]
            if wrapper is not None:
                setattr(owner, name, wrapper)

    def _stand_in(self, found: Any, owner: Any, name: str) -> Any:
        """What stands for an attribute of a module or a class. None: it stays."""
        if isinstance(found, (staticmethod, classmethod)):
            is_bound = isinstance(found, classmethod)
            return type(found)(self._wrap(found.__func__, int(is_bound), name))
        if type(found) is property and found.fget is not None:
            return property(self._wrap(found.fget, 1, name), found.fset, found.fdel, found.__doc__)
        if isinstance(found, functools.cached_property):
            made = functools.cached_property(self._wrap(found.func, 1, name))
            made.__set_name__(owner, name)
            return made
        if not isinstance(owner, type):
            return self._wrap(found, 0, name) if callable(found) else None
        if isinstance(found, functools.partialmethod):
            found = found.__get__(None, owner)
        if not callable(found):
            return None
        if hasattr(type(found), "__get__"):
            return self._wrap(found, 1, name)
        return staticmethod(self._wrap(found, 0, name))

    def _wrap(self, function: Callable, num_kept: int, name: str) -> Callable:
        @functools.wraps(function)
        def called(*plain: Any, **named: Any) -> Any:
            if self._depth:
                return function(*plain, **named)
            if self._rng.random() < self._share:
                plain, named = vary_call(plain, named, num_kept, self._rng)
            if not num_kept and len(self.calls) < _MAX_CALLS:
                self._note_call(plain, named)
            return self._look_at(function, plain, named)

        called.__name__, called.__qualname__ = name, self._symbol
        for extra in ("cache_clear", "cache_info", "register", "dispatch"):
            if hasattr(function, extra):
                setattr(
                    called, extra, vars(called).get(extra) or operator.attrgetter(extra)(function)
                )
        return called

    def _note_call(self, plain: tuple[Any, ...], named: dict[str, Any]) -> None:
        with contextlib.suppress(NoForm, RecursionError):
            forms = {key: encode(value) for key, value in named.items()}
            text = json.dumps({"plain": [encode(value) for value in plain], "named": forms})
            if len(text) <= MAX_TEXT and text not in self.calls:
                self.calls.append(text)

    def _look_at(self, function: Callable, plain: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._num_calls += 1
        effects = Effects(plain, named) if self._num_calls <= _MAX_LOOKED_AT else None
        self._depth += 1
        started = time.perf_counter()
        try:
            value = function(*plain, **named)
        except Exception as error:
            if not str(error):
                self.facts.add(f"raises {type(error).__name__} without a text")
            raise
        finally:
            self._depth -= 1
            self.seconds.append(time.perf_counter() - started)
            if effects is not None:
                self.facts |= effects.find()
        if effects is not None:
            self.facts.add(f"returns {kind_of(value)}")
        return self._relay(value, effects) if is_builtin_iterator(value) else value

    def _relay(self, steps: Any, effects: "Effects | None") -> Iterator[Any]:
        """The same items. What computes them counts as inside of the call."""
        place = len(self.seconds) - 1
        ask = functools.partial(next, steps)
        while True:
            self._depth += 1
            started = time.perf_counter()
            try:
                item = ask()
            except StopIteration as end:
                return end.value
            finally:
                self._depth -= 1
                self.seconds[place] += time.perf_counter() - started
                if effects is not None:
                    self.facts |= effects.find()
            try:
                sent = yield item
                ask = functools.partial(*((next, steps) if sent is None else (steps.send, sent)))
            except GeneratorExit:
                if isinstance(steps, GeneratorType):
                    steps.close()
                raise
            except BaseException as error:  # noqa: BLE001 - thrown in by the caller
                ask = functools.partial(steps.throw, error)


class Effects:
    """Changes that a call makes around it: arguments, environment, folder, random numbers, output."""

    def __init__(self, plain: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._arguments = [*enumerate(plain), *named.items()]
        self._before = self._forms()
        self._around = _surroundings()
        self._written = _written()

    def find(self) -> set[str]:
        """The changes until now, as facts."""
        found = {
            f"changes argument {name}"
            for (name, _), before, after in zip(
                self._arguments, self._before, self._forms(), strict=True
            )
            if before != after
        }
        around = _surroundings()
        found |= {
            f"changes {name}" for name, value in self._around.items() if around[name] != value
        }
        return found | ({"prints"} if _written() != self._written else set())

    def _forms(self) -> list[Any]:
        return [
            describe_text(value) if isinstance(value, _MUTABLE) else None
            for _, value in self._arguments
        ]


def _surroundings() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "random state": random.getstate(),
        "path of modules": list(sys.path),
        "limit of recursion": sys.getrecursionlimit(),
    }


def _written() -> list[int]:
    """How much was written to output and errors, to the streams and below them."""
    sizes = [os.fstat(number).st_size for number in (1, 2)]
    for stream in (sys.stdout, sys.stderr):
        try:
            sizes.append(stream.tell())
        except (OSError, ValueError, AttributeError):
            sizes.append(0)
    return sizes
