"""Which instances of a parametrized test a trial runs does not depend on the ids that pytest gives them."""

import io
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.sandbox.inside.trials.trial_observer import Observer

TEST = "tests/test_a.py::test_a"
MOST = 12


def kept_instances(values: list[int], order: int, chosen: tuple[str, ...] = ()) -> dict[int, str]:
    """Value -> name of the instances that run when a set's cases come in this order. Ids count them."""
    items = [
        SimpleNamespace(nodeid=f"{TEST}[value{at}]", callspec=SimpleNamespace(params={"it": value}))
        for at, value in enumerate(values)
    ]
    request = {
        "tests": [TEST],
        "instances": [f"{TEST}[value3]", f"{TEST}[value5]"],
        "chosen": chosen,
        "order": order,
        "most": MOST,
        "function": None,
    }
    Observer(request, io.StringIO()).pytest_collection_modifyitems(items)
    return {item.callspec.params["it"]: item.observed_name for item in items}


@given(st.randoms(use_true_random=False), st.integers(0, 99))
def test_a_later_run_has_the_instances_of_the_first(rng: random.Random, order: int) -> None:
    values = list(range(30))
    first = kept_instances(values, order)
    assert first.keys() >= {3, 5}
    assert len(first) == MOST
    mixed = rng.sample(values, len(values))
    again = kept_instances(mixed, order, tuple(first.values()))
    assert list(again.items()) == list(first.items()), "in the same order"


@pytest.mark.parametrize("num", [1, 4])
def test_few_instances_run_all(num: int) -> None:
    assert kept_instances(list(range(num)), 7).keys() == set(range(num))
