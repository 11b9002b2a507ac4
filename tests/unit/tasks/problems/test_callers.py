"""Callers are known only where names alone decide them."""

import pytest

from ostinato.tasks.problems.breaking.definitions import find_callers, read_definitions

CODE = b"""
import functools

__all__ = ["double"]

def double(n):
    return n + n

def first(n):
    return double(n)

class Shop:
    def second(self, n):
        def inner():
            return [double(each) for each in n]
        return inner()
"""
OTHER = b"""
from shop import code
from shop.code import double

def third(n, double_it=True):
    return code.double(n)
"""
UNKNOWN = {
    "a value": "best = max([1], key=double)",
    "a decorator": "@double\ndef made():\n    pass",
    "a call of the module": "four = double(2)",
    "a default": "def made(n=double(2)):\n    return n",
    "another name for it": "from shop.code import double as twice",
    "an attribute of an object": "def made(it):\n    return it.double(2)",
    "a string": "def made(it):\n    return getattr(it, 'double')(2)",
    "a parameter": "def made(double):\n    return double(2)",
    "a second definition": "def double(n):\n    return n",
    "a nested definition": "def made():\n    def double(n):\n        return n\n    return double",
    "an assignment": "def made():\n    double = 3\n    return double",
    "a file that does not parse": "def (",
}


def callers_of_double(**extra: str) -> list[str] | None:
    files = {"shop/code.py": CODE, "shop/other.py": OTHER}
    files |= {f"shop/{name}.py": text.encode() for name, text in extra.items()}
    found = find_callers(files, read_definitions(files))
    known = {definition.qualified_name: callers for definition, callers in found.items()}
    return [item.qualified_name for item in known["double"]] if "double" in known else None


def test_every_function_and_method_that_calls_is_found_once() -> None:
    assert callers_of_double() == ["first", "Shop.second", "third"]
    again = "from shop.code import double\n\ndef made():\n    return double(double(1))\n"
    assert callers_of_double(more=again) == ["first", "Shop.second", "made", "third"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_any_other_use_of_the_name_makes_callers_unknown(name: str) -> None:
    assert callers_of_double(extra=UNKNOWN[name]) is None


def test_a_function_that_calls_itself_is_left_out() -> None:
    files = {"a.py": b"def count(n):\n    return n and count(n - 1)\n"}
    assert find_callers(files, read_definitions(files)) == {}
