from collections import Counter

import pytest

from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.config import Kind, ProblemsConfig, SplitSizes
from ostinato.tasks.problems.selection import (
    assign_splits,
    choose_held_out_functions,
    order_mutations,
    place_of,
)
from ostinato.tasks.records import LineEdit, Split

SIZES = SplitSizes(demonstration=20, train=16, held_out=8, held_out_function=6, user=4)


def make_config(**fields) -> ProblemsConfig:
    return ProblemsConfig(
        **{"sizes": SIZES, "functions_held_out": 3, "max_per_function": 18, **fields}
    )


def make_edit(text: str) -> LineEdit:
    return LineEdit(path="kit/m.py", line_number=2, gold_text="pass", broken_text=text)


def make_candidates(num_functions=12, per_operator=6) -> list[Candidate]:
    return [
        Candidate(
            repository="kit",
            kind=Kind.MUTATION,
            operator=operator,
            path="kit/m.py",
            symbol=f"f{function}",
            first_line=1,
            last_line=2,
            edits=(make_edit(f"{operator} {number}"),),
            touched=(),
        )
        for function in range(num_functions)
        for operator in ("wrong_variable", "integer", "comparison")
        for number in range(per_operator)
    ]


def order(candidates, config):
    functions = {}
    for item in candidates:
        functions.setdefault(place_of(item), []).append(item)
    return list(order_mutations({p: lambda f=f: f for p, f in functions.items()}, config))


def split_candidates(config):
    candidates = make_candidates()
    held_out = choose_held_out_functions(dict.fromkeys(map(place_of, candidates)), config)
    splits = assign_splits(order(candidates, config), held_out, config)
    return {
        (place_of(item), item.candidate_id): splits[item.candidate_id]
        for item in candidates
        if item.candidate_id in splits
    }


def test_splits_have_their_sizes():
    sizes = Counter(split_candidates(make_config()).values())
    assert {split: sizes[split] for split in Split} == {split: SIZES.of(split) for split in Split}


def test_held_out_functions_occur_nowhere_else():
    splits = split_candidates(make_config())
    whole = {place for (place, _), split in splits.items() if split is Split.HELD_OUT_FUNCTION}
    others = {place for (place, _), split in splits.items() if split is not Split.HELD_OUT_FUNCTION}
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
    ordered = order(make_candidates(), make_config(max_per_function=5))
    assert set(Counter(place_of(item) for item in ordered).values()) == {5}
    assert len({place_of(item) for item in ordered[:12]}) == 12
    assert len({item.candidate_id for item in ordered}) == len(ordered) == 60


def test_operators_are_taken_in_the_proportions_of_the_mix():
    even = Counter(item.operator for item in order(make_candidates(), make_config())[:60])
    assert max(even.values()) - min(even.values()) <= 1
    config = make_config(operator_mix="noticed")
    noticed = Counter(item.operator for item in order(make_candidates(), config)[:56])
    assert noticed == {"wrong_variable": 46, "integer": 6, "comparison": 4}
    config = make_config(operators_left_out=("integer",))
    assert "integer" not in {item.operator for item in order(make_candidates(), config)}


@pytest.mark.parametrize(
    ("kind", "names", "asks"),
    [
        (Kind.MUTATION, ["Point.__hash__"], True),
        (Kind.MUTATION, ["Point.hash"], False),
        (Kind.COMBINED, ["Point.norm", "Point.__hash__"], True),
        (Kind.DELETED_FUNCTION, ["__hash__"], True),
        (Kind.MINED_COMMIT, ["Point.norm", "Point.__hash__"], False),
        (Kind.MINED_COMMIT, ["Point.__hash__"], True),
        (Kind.MINED_COMMIT, [], False),
    ],
)
def test_repairs_of_hashes_prove_nothing(kind, names, asks):
    """Found by `ostinato certify`: a constant was paid, since it is a right hash."""
    keys = tuple(("kit/m.py", line, name) for line, name in enumerate(names, 1))
    candidate = make_candidates()[0].model_copy(update={"kind": kind, "touched": keys})
    assert candidate.asks_for_hash is asks
