from collections import Counter

import pytest

from ostinato.tasks.problems.config import ProblemsConfig, SplitSizes
from ostinato.tasks.problems.functions import Function
from ostinato.tasks.problems.mutations import Mutation
from ostinato.tasks.problems.selection import (
    assign_splits,
    candidate_id,
    choose_held_out_functions,
    order_candidates,
)
from ostinato.tasks.records import Split

SIZES = SplitSizes(demonstration=20, train=16, held_out=8, held_out_function=6, user=4)


def make_config(**fields) -> ProblemsConfig:
    return ProblemsConfig(**{"sizes": SIZES, "functions_held_out": 3, **fields})


def make_candidates(num_functions=12, per_operator=6) -> list[Mutation]:
    functions = [
        Function("kit", "kit/m.py", f"f{n}", 1, 2, ("def f():", "    x"))
        for n in range(num_functions)
    ]
    return [
        Mutation(function, operator, 2, "    x", f"    {operator}{number}")
        for function in functions
        for operator in ("wrong_variable", "integer", "comparison")
        for number in range(per_operator)
    ]


def split_candidates(config):
    candidates = make_candidates()
    functions = list(dict.fromkeys(item.function for item in candidates))
    held_out = choose_held_out_functions(functions, config)
    splits = assign_splits(order_candidates(candidates, config), held_out, config)
    return {item: splits[candidate_id(item)] for item in candidates if candidate_id(item) in splits}


def test_splits_have_their_sizes():
    sizes = Counter(split_candidates(make_config()).values())
    assert {split: sizes[split] for split in Split} == {split: SIZES.of(split) for split in Split}


def test_held_out_functions_occur_nowhere_else():
    splits = split_candidates(make_config())
    whole = {item.function for item, split in splits.items() if split is Split.HELD_OUT_FUNCTION}
    others = {
        item.function for item, split in splits.items() if split is not Split.HELD_OUT_FUNCTION
    }
    assert whole
    assert not whole & others


@pytest.mark.parametrize("seed", [0, 1])
def test_same_seed_gives_the_same_splits(seed):
    config = make_config(seed=seed)
    assert split_candidates(config) == split_candidates(config)


def test_seeds_give_different_splits():
    assert split_candidates(make_config(seed=0)) != split_candidates(make_config(seed=1))


def test_too_few_problems_are_shared_out_in_proportion():
    big = SplitSizes(demonstration=800, train=600, held_out=240, held_out_function=60, user=160)
    sizes = Counter(split_candidates(make_config(sizes=big)).values())
    assert (
        0
        < sizes[Split.USER]
        < sizes[Split.HELD_OUT]
        < sizes[Split.TRAIN]
        < sizes[Split.DEMONSTRATION]
    )


def test_order_is_capped_and_reaches_every_function_first():
    config = make_config(max_per_function_operator=4, operator_caps={"integer": 1})
    ordered = order_candidates(make_candidates(), config)
    counts = Counter((item.function.name, item.operator) for item in ordered)
    assert {count for (_, operator), count in counts.items() if operator == "integer"} == {1}
    assert {count for (_, operator), count in counts.items() if operator != "integer"} == {4}
    assert len({item.function for item in ordered[:12]}) == 12
    assert len({(item.function, item.operator) for item in ordered[:36]}) == 36
