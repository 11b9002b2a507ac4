"""Perturbation of values: plain data near the given data. Runs in boxes, standard library only."""

import copy
import random
import re
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any

_CONTAINERS = (list, tuple, dict, set, frozenset, OrderedDict, Counter, defaultdict, deque)
_DAYS = (-183, -30, -1, 1, 45, 183)
_TRIES = 8  # attempts to find a changed text that still matches a pattern


def vary_call(
    plain: tuple[Any, ...], named: dict[str, Any], num_kept: int, rng: random.Random
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with one of them changed, if possible. The first `num_kept` are never changed."""
    places: list[Any] = [*range(num_kept, len(plain)), *named]
    rng.shuffle(places)
    for place in places:
        value = named[place] if isinstance(place, str) else plain[place]
        other = vary_value(value, rng)
        if other is value:
            continue
        if isinstance(place, str):
            return plain, {**named, place: other}
        return (*plain[:place], other, *plain[place + 1 :]), named
    return plain, named


def vary_value(value: Any, rng: random.Random) -> Any:
    """A value of the same type near the given one. Returns the same object if it is not plain data."""
    kind = type(value)
    if kind in _CONTAINERS or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return _vary_container(value, rng)
    if kind is str and value:
        place = rng.randrange(len(value))
        near = chr(max(1, min(ord(value[place]) + rng.choice((-2, -1, 1, 2)), 0xD7FF)))
        ways = (value[:place] + near + value[place + 1 :], value[:place] + value[place + 1 :])
        return rng.choice((*ways, value[::-1], value.swapcase(), value + value[place]))
    if kind in (bytes, bytearray) and value:
        return kind(vary_value(value.decode("latin-1"), rng).encode("latin-1", "replace"))
    if kind is re.Match:
        return _vary_match(value, rng)
    try:
        return _vary_number(value, rng)
    except (ArithmeticError, ValueError):  # beyond the last date that Python has
        return value


def _vary_number(value: Any, rng: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case _ if type(value) in (int, Fraction):
            return value + rng.choice((-2, -1, 1, 2, 7))
        case _ if type(value) in (float, complex):
            return value * rng.choice((0.5, 1.5, -1.0))
        case _ if type(value) is Decimal:
            return value * rng.choice((Decimal("0.5"), Decimal("1.5"), -1))
        case _ if type(value) in (datetime, date):
            return value + timedelta(days=rng.choice(_DAYS), hours=rng.choice((0, 1, 7)))
        case _ if type(value) is time:
            return value.replace(hour=(value.hour + rng.choice((1, 7, 12))) % 24)
        case _ if type(value) is timedelta:
            return value + timedelta(days=rng.choice(_DAYS))
        case Enum():
            return rng.choice([member for member in type(value) if member is not value] or [value])
        case PurePath() if value.name and not value.is_absolute():  # tests have made the others
            return value.with_name(vary_value(value.name, rng))
        case _ if type(value).__module__ in ("ipaddress", "uuid"):
            return _vary_address(value, rng)
        case _:
            return value


def _vary_address(value: Any, rng: random.Random) -> Any:
    """Another UUID, or another address, network or interface of the same length. Neither module is imported here."""
    kind = type(value)
    if hasattr(value, "hex"):
        return kind(int=value.int ^ (1 << rng.randrange(128)))
    if hasattr(value, "network_address"):
        step = rng.choice((-1, 1, 2)) * value.num_addresses
        return kind((int(value.network_address) + step, value.prefixlen))
    step = rng.choice((-2, -1, 1, 2, 7, 2**16, 2**24))
    if hasattr(value, "network"):
        return kind((int(value.ip) + step, value.network.prefixlen))
    return kind(int(value) + step)


def _vary_container(value: Any, rng: random.Random) -> Any:
    """A copy with one value changed. Returns the container itself if no value can be changed."""
    kind = type(value)
    is_mapping = issubclass(kind, dict)
    items = list(value.values() if is_mapping else value)
    if kind in (set, frozenset):
        items.sort(key=repr)  # an order that does not depend on hashes
    places = list(range(len(items)))
    rng.shuffle(places)
    for place in places:
        other = vary_value(items[place], rng)
        if other is not items[place]:
            items[place] = other
            if is_mapping or kind is deque:  # copies keep the default, or the maximum length
                changed = copy.copy(value)
                changed[list(value)[place] if is_mapping else place] = other
                return changed
            make: Any = getattr(kind, "_make", kind)  # of a named tuple
            return make(items)
    return value


def _vary_match(match: re.Match, rng: random.Random) -> re.Match:
    """A match of the same pattern at the same place of a changed text. Returns the match itself after _TRIES."""
    for _ in range(_TRIES):
        other = match.re.match(vary_value(match.string, rng), match.start())
        if other is not None and other.group() != match.group():
            return other
    return match
