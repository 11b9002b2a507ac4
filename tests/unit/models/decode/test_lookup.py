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


class AlwaysCopy(SpeculationGate):
    """A gate that drafts with its layers, if there are any, and copies wherever it can."""

    def choose(self, batch: int) -> int:
        return 2 * self.max_depth + 1


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
    copying._speculator.gate = AlwaysCopy(depth, max_batch=4, has_copies=True)
    expected, generations = run(plain, requests), run(copying, requests)
    for one in requests:
        mine, theirs = generations[one.request_id], expected[one.request_id]
        assert mine.token_ids == theirs.token_ids
        assert mine.stop_reason is theirs.stop_reason
        np.testing.assert_allclose(mine.logprobs_T, theirs.logprobs_T, atol=2e-5)
    assert sum(one.draft_tokens_accepted for one in generations.values()) > 0


def test_copies_stand_behind_the_context_or_behind_drafts() -> None:
    config = EngineConfig(slots=1, lookup_tokens=4, speculation_depth=2)
    speculator = DecodeEngine(TINY, WEIGHTS, config)._speculator
    assert speculator is not None
    speculator.gate = AlwaysCopy(2, max_batch=1, has_copies=True)
    slots_B, repeats = np.array([0]), (*range(8, 24), 8, 9)
    table = table_of(repeats)
    drafted = speculator.propose(WEIGHTS, table, slots_B)
    assert (drafted.layered, drafted.width) == (0, 1 + 4)
    assert table.tokens_SC[0, 18:22].tolist() == [10, 11, 12, 13]
    table = table_of((*repeats[:-1], 3))  # no pair of its last tokens: the layers draft
    drafted = speculator.propose(WEIGHTS, table, slots_B)
    assert drafted.layered == 2
    table.tokens_SC[0, 18:20] = [8, 9]
    assert speculator._copy(table, slots_B, 2) == 4
    assert table.tokens_SC[0, 20:24].tolist() == [10, 11, 12, 13]


def run(engine: DecodeEngine, requests: list[GenerateRequest]) -> dict[str, Generation]:
    for one in requests:
        engine.submit(one)
    finished = {}
    while engine.has_work:
        finished |= {generation.request_id: generation for generation in engine.step()}
    return finished
