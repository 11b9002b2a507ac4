"""Other arguments than callers give for calls of one function. Runs in boxes, standard library only."""

import functools
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


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
