"""Drafts from what followed the same tokens before: the longest earlier match is continued, answers
are remembered, as many drafts are written as pay, and no sample changes.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.models.decode.drafts.policy import DraftPolicy
from ostinato.models.decode.drafts.speculation import Lookup
from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.decode.slots import SlotTable
from ostinato.models.decode.weights import prepare_weights
from tests.fakes.engine_runs import run
from tests.fakes.tiny_model import TINY, random_weights

WEIGHTS = prepare_weights(TINY, random_weights(TINY), 0)

FREE = np.ones(4, dtype=np.float32)  # costs of steps with 0 to 3 drafts: drafts cost nothing


class AlwaysDraft(DraftPolicy):
    """A policy that never pauses, rests or compares."""

    def should_measure(self, batch: int) -> bool:
        return True

    def should_draft(self, batch: int) -> bool:
        return True


class LayersNowAndThen(AlwaysDraft):
    """Draft layers in one step of four."""

    _asked = 0

    def choose_layers(self, batch: int, lookup_rate: float) -> int:
        self._asked += 1
        return self.max_layers if self._asked % 4 == 0 else 0


def table_of(*contexts: tuple[int, ...], room: int = 40, stops: tuple[int, ...] = ()) -> SlotTable:
    table = SlotTable(len(contexts), 96, 100)
    for slot, context in enumerate(contexts):
        request = GenerateRequest("r", "s", context, room, stops)
        table.start(slot, request, np.array(context), 0, 96)
    return table


def drafts_of(
    table: SlotTable, lookup: Lookup, costs_w: np.ndarray = FREE, drafted: int = 0
) -> list[list[int]]:
    """The drafts of every slot."""
    slots_B = np.arange(len(table.context_S))
    count, _ = lookup.propose(table, slots_B, costs_w, drafted)
    places = table.context_S[:, None] + drafted + np.arange(count)
    return table.tokens_SC[slots_B[:, None], places].tolist()


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ((1, 2, 3, 4, 5, 9, 1, 2), [3, 4, 5]),  # what followed the last two tokens
        ((1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 1, 2), [8, 8, 8]),  # of equal matches the last
        ((5, 1, 2, 7, 7, 7, 4, 1, 2, 8, 8, 8, 5, 1, 2), [7, 7, 7]),  # but a longer one first
        ((1, 2, 3, 1, 2), [3, 1, 2]),  # up to the end of the context itself
        ((1, 2, 1, 2), [1, 2, 1]),  # and on in what it just proposed
    ],
)
def test_the_best_earlier_match_is_continued(context: tuple[int, ...], expected: list[int]) -> None:
    assert drafts_of(table_of(context), Lookup(0)) == [expected]


@pytest.mark.parametrize("context", [(1,), (1, 2), (1, 2, 3, 4, 5, 6)])
def test_where_nothing_matches_nothing_is_drafted(context: tuple[int, ...]) -> None:
    assert drafts_of(table_of(context), Lookup(256)) == [[]]


def test_each_slot_copies_from_its_own_context_and_fills_up_with_its_last_token() -> None:
    table = table_of((1, 2, 3, 4, 1, 2), (5, 6, 7, 8, 5, 6), (1, 2, 3, 4, 5, 6))
    assert drafts_of(table, Lookup(0), FREE[:3]) == [[3, 4], [7, 8], [6, 6]]


def test_a_match_may_begin_in_the_drafts() -> None:
    table = table_of((1, 2, 7, 8, 9, 5, 1))
    table.tokens_SC[0, 7] = 2
    assert drafts_of(table, Lookup(0), drafted=1) == [[7, 8, 9]]


def test_answers_are_remembered_for_other_contexts() -> None:
    lookup = Lookup(256)
    lookup.learn(np.array([9, 8, 1, 2, 3, 4, 5]), start=3)
    assert drafts_of(table_of((7, 1, 2)), lookup) == [[3, 4, 5]]
    assert drafts_of(table_of((7, 9, 8)), lookup) == [[]]  # the prompt's own tokens are not


def test_without_entries_answers_are_forgotten() -> None:
    lookup = Lookup(0)
    lookup.learn(np.array([9, 8, 1, 2, 3, 4, 5]), start=3)
    assert drafts_of(table_of((7, 1, 2)), lookup) == [[]]


def test_the_follower_seen_more_often_is_guessed() -> None:
    lookup = Lookup(256)
    for follower in (3, 4, 4, 4, 3, 4):
        lookup.learn(np.array([1, 2, follower]), start=2)
    assert drafts_of(table_of((7, 1, 2)), lookup, FREE[:2]) == [[4]]
    for _ in range(8):
        lookup.learn(np.array([1, 2, 5]), start=2)
    assert drafts_of(table_of((7, 1, 2)), lookup, FREE[:2]) == [[5]]


def test_guesses_that_fail_are_made_no_more() -> None:
    """Pairs that repeat, but are followed by something else each time."""
    lookup, costs_w = Lookup(256), np.array([1.0, 1.25], dtype=np.float32)
    context = (1, 2, 3, 1, 2)
    assert drafts_of(table_of(context), lookup, costs_w) == [[3]]
    for follower in range(10, 40):
        lookup.learn(np.array([1, 2, follower - 1, 1, 2, follower]), start=5)
    assert drafts_of(table_of((1, 2, 39, 1, 2)), lookup, costs_w) == [[]]


@pytest.mark.parametrize(("slope", "expected"), [(0.01, 3), (0.6, 0)])
def test_as_many_are_drafted_as_pay(slope: float, expected: int) -> None:
    costs_w = (1 + slope * np.arange(4)).astype(np.float32)
    drafts = drafts_of(table_of((1, 2, 3, 4, 5, 9, 1, 2)), Lookup(256), costs_w)
    assert len(drafts[0]) == expected


def test_a_number_of_drafts_can_be_barred() -> None:
    costs_w = np.array([1, np.inf, np.inf, 1.1], dtype=np.float32)
    assert len(drafts_of(table_of((1, 2, 3, 4, 5, 9, 1, 2)), Lookup(256), costs_w)[0]) == 3


def test_nothing_is_drafted_behind_a_stop_token_or_the_end_of_a_request() -> None:
    context = (1, 2, 3, 4, 5, 9, 1, 2)
    assert drafts_of(table_of(context, stops=(3,)), Lookup(256)) == [[3]]
    assert drafts_of(table_of(context, room=2), Lookup(256)) == [[3]]
    assert drafts_of(table_of(context, room=1), Lookup(256)) == [[]]


def test_entries_are_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="lookup_entries=100, wanted 0 or a power of two"):
        Lookup(100)


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=60), max_size=30),
    entries=st.sampled_from([0, 1, 4, 64]),
    slots=st.integers(1, 3),
    drafted=st.integers(0, 2),
)
def test_drafts_are_tokens_and_nothing_else_changes(
    answers: list[list[int]], entries: int, slots: int, drafted: int
) -> None:
    """Whatever was learned: contexts stay, drafts are tokens seen, no place behind them is written."""
    lookup = Lookup(entries)
    for answer in answers:
        lookup.learn(np.array(answer), start=len(answer) // 2)
    rng = np.random.default_rng(len(answers))
    contexts = [tuple(rng.integers(0, 6, rng.integers(1, 70)).tolist()) for _ in range(slots)]
    table = table_of(*contexts, room=20)
    table.tokens_SC[:, 80:] = -7
    count, rate = lookup.propose(
        table, np.arange(slots), (1 + 0.05 * np.arange(8)).astype(np.float32), drafted
    )
    assert 0 <= count <= 7
    assert rate >= 1 + drafted - 1e-5
    for slot, context in enumerate(contexts):
        first = len(context) + drafted
        assert tuple(table.tokens_SC[slot, : len(context)].tolist()) == context
        drafts = table.tokens_SC[slot, first : first + count]
        assert ((drafts >= 0) & (drafts < 6)).all()
    assert (table.tokens_SC[:, 80:] == -7).all()


@pytest.mark.parametrize(("temperature", "depth"), [(0.0, 0), (0.5, 0), (1.0, 0), (1.0, 2)])
def test_drafts_change_no_token(temperature: float, depth: int) -> None:
    """The same prompts twice: the second time answers are remembered, the greedy ones whole."""
    prompt = (3, 9, 4, 7, 3, 9, 4, 7, 3, 9)
    requests = [
        GenerateRequest(
            f"r{i}", f"s{i}", (i % 7 + 1, *prompt), 30 + i, (30,), temperature, seed=i % 7
        )
        for i in range(14)
    ]
    plain = DecodeEngine(TINY, WEIGHTS, EngineConfig(slots=4))
    config = EngineConfig(slots=4, lookup_tokens=4, draft_layers=depth)
    copying = DecodeEngine(TINY, WEIGHTS, config)
    assert copying._speculator is not None
    copying._speculator.policy = LayersNowAndThen(depth, max_batch=4, max_copies=4)
    expected, generations = run(plain, requests), run(copying, requests)
    for one in requests:
        mine, theirs = generations[one.request_id], expected[one.request_id]
        assert mine.token_ids == theirs.token_ids
        assert mine.stop_reason is theirs.stop_reason
        np.testing.assert_allclose(mine.logprobs_T, theirs.logprobs_T, atol=2e-5)
    assert sum(one.draft_tokens_accepted for one in generations.values()) > 0


@pytest.mark.timeout(300)  # the first run on a machine compiles for 20 s of CPU
def test_compiled_drafts_change_no_bit() -> None:
    """Stop sequences, top-k and top-p among them: those rows are drawn again from the logits."""
    weights = prepare_weights(TINY, random_weights(TINY), 0)
    requests = [
        GenerateRequest(
            f"r{i}",
            f"s{i}",
            (i % 5 + 1, 3, 9, 4, 3, 9),
            30 + i,
            (30,),
            (0.0, 0.5, 1.0)[i % 3],
            0.9 if i % 4 == 1 else 1.0,
            seed=i % 5,
            top_k=4 if i % 4 == 2 else 0,
            stop_sequences=((7, 8),) if i % 7 == 3 else (),
        )
        for i in range(30)
    ]
    plain = DecodeEngine(TINY, weights, EngineConfig(slots=4))
    config = EngineConfig(slots=4, lookup_tokens=4, draft_layers=2)
    copying = DecodeEngine(TINY, weights, config)
    assert copying._speculator is not None
    copying._speculator.policy = LayersNowAndThen(2, max_batch=4, max_copies=4)
    expected, generations = run(plain, requests), run(copying, requests)
    for one in requests:
        mine, theirs = generations[one.request_id], expected[one.request_id]
        assert mine.token_ids == theirs.token_ids
        assert mine.stop_reason is theirs.stop_reason
        np.testing.assert_array_equal(mine.routed_experts, theirs.routed_experts)
        if one.top_k == 0 and one.top_p == 1:  # the others are sorted in whole batches
            np.testing.assert_array_equal(mine.logprobs_T, theirs.logprobs_T)
    assert sum(one.draft_tokens_accepted for one in generations.values()) > 50


def test_copies_stand_behind_the_context_or_behind_drafts() -> None:
    config = EngineConfig(slots=1, lookup_tokens=4, draft_layers=2)
    engine = DecodeEngine(TINY, WEIGHTS, config)
    engine.submit(GenerateRequest("r", "s", (1, 2, 3), 9, ()))
    engine.step()  # leaves the hidden state that draft layers begin with
    speculator = engine._speculator
    assert speculator is not None
    policy = speculator.policy = AlwaysDraft(2, max_batch=1, max_copies=4)
    slots_B, repeats = np.array([0]), (*range(8, 24), 8, 9)
    policy.record(1, 0, 0, 1.0, 1)
    for layers in (1, 2):  # draft layers are dear
        policy.record(1, layers, 0, 9.0, 1 + layers)
    table = table_of(repeats)
    drafted = speculator.propose(WEIGHTS, table, slots_B)
    assert (drafted.layered, drafted.width) == (0, 1 + 2)  # untried guesses are even chances
    assert table.tokens_SC[0, 18:20].tolist() == [10, 11]
    speculator.policy = AlwaysDraft(2, max_batch=1, max_copies=4)
    table = table_of((*repeats[:-1], 3))  # no pair of its last tokens: layers are tried
    drafted = speculator.propose(WEIGHTS, table, slots_B)
    assert drafted.layered == 2
