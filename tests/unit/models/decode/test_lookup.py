"""Drafts copied from the context: the longest earlier match is continued, and no sample changes."""

import numpy as np
import pytest

from models.decode.engine import DecodeEngine, EngineConfig
from models.decode.gate import SpeculationGate
from models.decode.lookup import find_continuations
from models.decode.protocol import GenerateRequest, Generation
from models.decode.slots import SlotTable
from models.decode.weights import prepare_weights
from tests.fakes.tiny_model import TINY, random_weights

WEIGHTS = prepare_weights(TINY, random_weights(TINY), 0)


class AlwaysLookUp(SpeculationGate):
    """A gate that copies wherever there is something to copy."""

    def choose(self, batch: int, *, has_match: bool = False) -> int:
        return self.lookup_choice if has_match else 0


class AlwaysCopyBehind(SpeculationGate):
    """A gate that drafts with its layers and believes in copies."""

    def choose(self, batch: int, *, has_match: bool = False) -> int:
        return self.max_depth

    def preferred_depth(self, batch: int, *, has_match: bool = False) -> int:
        return self.lookup_choice


def table_of(*contexts: tuple[int, ...]) -> SlotTable:
    table = SlotTable(len(contexts), 96, 100)
    for slot, context in enumerate(contexts):
        table.start(slot, GenerateRequest("r", "s", context, 9, ()), np.array(context), 0, 96)
    return table


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ((1, 2, 3, 4, 5, 9, 1, 2), (3, 4, 5)),  # what followed the last two tokens
        ((1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 1, 2), (8, 8, 8)),  # of equal matches the last
        ((5, 1, 2, 7, 7, 7, 4, 1, 2, 8, 8, 8, 5, 1, 2), (7, 7, 7)),  # but a longer one first
        ((1, 2, 3, 1, 2), (3, 1, 2)),  # up to the end of the context itself
    ],
)
def test_the_best_earlier_match_is_continued(
    context: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    proposals_Bk, found = find_continuations(table_of(context), np.array([0]), 3)
    assert tuple(proposals_Bk[0]) == expected
    assert found == 1


@pytest.mark.parametrize("context", [(1,), (1, 2), (1, 2, 3, 4, 5, 6), (1, 2, 1, 2)])
def test_nothing_to_copy_is_said(context: tuple[int, ...]) -> None:
    proposals_Bk, found = find_continuations(table_of(context), np.array([0]), 3)
    assert found == 0
    assert set(proposals_Bk[0]) == {context[-1]}


def test_each_slot_copies_from_its_own_context() -> None:
    table = table_of((1, 2, 3, 4, 1, 2), (5, 6, 7, 8, 5, 6), (1, 2, 3, 4, 5, 6))
    proposals_Bk, found = find_continuations(table, np.arange(3), 2)
    assert proposals_Bk.tolist() == [[3, 4], [7, 8], [6, 6]]
    assert found == 2


def test_a_match_may_begin_in_the_drafts() -> None:
    table = table_of((1, 2, 7, 8, 9, 5, 1))
    table.tokens_SC[0, 7] = 2
    proposals_Bk, found = find_continuations(table, np.array([0]), 3, drafted=1)
    assert (proposals_Bk.tolist(), found) == ([[7, 8, 9]], 1)


@pytest.mark.parametrize(("temperature", "depth"), [(0.0, 0), (0.5, 0), (1.0, 0), (1.0, 2)])
def test_copied_drafts_change_no_token(temperature: float, depth: int) -> None:
    prompt = (3, 9, 4, 7, 3, 9, 4, 7, 3, 9)
    requests = [
        GenerateRequest(f"r{i}", f"s{i}", (i + 1, *prompt), 30 + i, (30,), temperature, seed=i)
        for i in range(7)
    ]
    plain = DecodeEngine(TINY, WEIGHTS, EngineConfig(slots=4))
    config = EngineConfig(slots=4, lookup_tokens=4, speculation_depth=depth)
    copying = DecodeEngine(TINY, WEIGHTS, config)
    assert copying._speculator is not None
    gate = AlwaysCopyBehind if depth else AlwaysLookUp
    copying._speculator.gate = gate(depth, max_batch=4)
    expected, generations = run(plain, requests), run(copying, requests)
    for one in requests:
        mine, theirs = generations[one.request_id], expected[one.request_id]
        assert mine.token_ids == theirs.token_ids
        assert mine.stop_reason is theirs.stop_reason
        np.testing.assert_allclose(mine.logprobs_T, theirs.logprobs_T, atol=2e-5)
    assert sum(one.draft_tokens_accepted for one in generations.values()) > 0


def test_copies_follow_the_drafts_of_layers() -> None:
    config = EngineConfig(slots=1, lookup_tokens=4, speculation_depth=2)
    speculator = DecodeEngine(TINY, WEIGHTS, config)._speculator
    assert speculator is not None
    speculator.gate = AlwaysCopyBehind(2, max_batch=1)
    table = table_of(tuple(range(32)) * 2 + (3,))  # every pair of neighbours continues
    drafted = speculator.propose(WEIGHTS, table, np.array([0]))
    drafts = table.tokens_SC[0, 65:67].tolist()
    has_place = (drafts[1] - drafts[0]) % 32 == 1
    assert (drafted.layered, drafted.width) == (2, 1 + 2 + 4 * has_place)
    table.tokens_SC[0, 65:67] = [8, 9]
    assert speculator._copy_behind(table, np.array([0]), 2) == 4
    assert table.tokens_SC[0, 67:71].tolist() == [10, 11, 12, 13]


def test_a_text_without_repetition_is_searched_ever_less_often() -> None:
    speculator = DecodeEngine(TINY, WEIGHTS, EngineConfig(lookup_tokens=4))._speculator
    assert speculator is not None
    table = table_of((1, 2, 3, 4, 5, 6))
    searched = []
    for _ in range(2000):
        before = speculator._misses
        speculator.propose(WEIGHTS, table, np.array([0]))
        searched.append(speculator._misses != before)
    assert sum(searched[:32]) == 32
    assert sum(searched[-1000:]) < 150


def run(engine: DecodeEngine, requests: list[GenerateRequest]) -> dict[str, Generation]:
    for one in requests:
        engine.submit(one)
    finished = {}
    while engine.has_work:
        finished |= {generation.request_id: generation for generation in engine.step()}
    return finished
