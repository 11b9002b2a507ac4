"""What a trial notes of a value does not depend on where its objects lie in memory."""

import json
import re
from collections.abc import Callable

import pytest

from ostinato.infra.sandbox.inside.value_forms import describe


class Placed:
    """An object whose hash is given, as that of an ordinary one is by its address."""

    def __init__(self, name: str, address: int) -> None:
        self.name, self.address = name, address

    def __hash__(self) -> int:
        return self.address

    def __repr__(self) -> str:
        return f"<Placed {self.name} at {self.address + 4096:#x}>"


def placed(*addresses: int) -> list[Placed]:
    return [Placed(name, address) for name, address in zip("abcd", addresses, strict=True)]


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize(
    "within",
    [lambda it: it, lambda it: [it, 1.5], lambda it: ("x", [it]), lambda it: {"k": it}],
    ids=["itself", "list", "tuple", "dict"],
)
def test_a_set_of_objects_shows_the_same_wherever_they_lie(
    kind: type, within: Callable[[object], object]
) -> None:
    forms = [describe(lambda items=items: within(kind(items))) for items in SEVERAL_PLACES]
    assert forms[0] == forms[1] == forms[2]
    assert forms[0] != describe(lambda: within(kind(placed(1, 2, 3, 4)[:3])))


SEVERAL_PLACES = [placed(1, 2, 3, 4), placed(4, 3, 2, 1), placed(64, 7, 129, 31)]


def test_values_that_hold_themselves_have_a_form() -> None:
    loop: list[object] = [object()]
    loop.append(loop)
    assert describe(lambda: loop)
    assert describe(lambda: [[object()] * 150] * 150)["returns"]["text"] == "long"


def test_long_values_are_told_apart() -> None:
    rows = [list(range(200)) for _ in range(150)]
    other = [*rows[:-1], [*rows[-1][:-1], -1]]
    for one, two in ((rows, other), ([object(), *rows], [object(), *other])):
        assert describe(lambda one=one: one) == describe(lambda one=one: one)
        assert describe(lambda one=one: one) != describe(lambda two=two: two)
    assert describe(lambda: Text("x" * 5_000 + "y")) != describe(lambda: Text("x" * 5_000 + "z"))


class Text:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (
            (1, 2.5, "x", b"y", None, True),
            {"tuple": [1, {"float": "0x1.4000000000000p+1"}, "x", {"bytes": "79"}, None, True]},
        ),
        ({"k": [1]}, {"dict": [["k", {"list": [1]}]]}),
        ({3, 1}, {"set": [1, 3]}),
        ([len, int], {"list": [{"name": "builtins:len"}, {"name": "builtins:int"}]}),
        ([re.compile("a")], {"list": [{"type": "Pattern", "text": "re.compile('a')"}]}),
        (
            {"k": re.compile("a")},
            {"dict": [{"tuple": ["k", {"type": "Pattern", "text": "re.compile('a')"}]}]},
        ),
        (object(), {"type": "object", "text": "<object object at 0x>"}),
    ],
)
def test_forms_are_those_that_shipped_problem_sets_hold(value: object, form: object) -> None:
    """Who changes one proves the shipped sets anew: a verdict compares with the results that stand there."""
    assert json.dumps(describe(lambda: value)) == json.dumps({"returns": form})
