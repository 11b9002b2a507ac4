"""Rows of a pass are the same however they are laid out: alone, several a slot, with neighbours."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.models.decode.batch import PrefillSpan, plan_batch
from ostinato.models.decode.cache import SlotCache
from ostinato.models.decode.forward import Trunk
from ostinato.models.decode.weights import prepare_weights
from tests.fakes.tiny_model import TINY, random_weights

WEIGHTS = prepare_weights(TINY, random_weights(TINY), 0)
SLOTS, POSITIONS = 9, 48
TRUNK = Trunk(TINY, POSITIONS)
TOKENS_SC = np.random.default_rng(0).integers(0, TINY.vocab_size, (SLOTS, POSITIONS))
NO_SLOTS = np.zeros(0, dtype=np.int64)


def run(
    cache: SlotCache, slots: list[int], cached: list[int], width: int, spans: list[PrefillSpan]
) -> tuple[Tensor, Tensor]:
    decoding = np.array(slots, dtype=np.int64)
    plan = plan_batch(cache, TOKENS_SC, decoding, np.array(cached, dtype=np.int64), width, spans)
    return TRUNK.forward(WEIGHTS, plan, cache)


def fed_cache(lengths: dict[int, int]) -> SlotCache:
    """Each slot fed alone; what lies behind is garbage that a mask must hide."""
    cache = SlotCache(TINY, SLOTS, POSITIONS)
    noise = torch.Generator().manual_seed(1)
    cache.keys_LSGdC.copy_(9 * torch.randn(cache.keys_LSGdC.shape, generator=noise))
    cache.values_LSGCd.copy_(9 * torch.randn(cache.values_LSGCd.shape, generator=noise))
    for slot, length in lengths.items():
        run(cache, [], [], 1, [PrefillSpan(slot, 0, length, 0)])
    return cache


def one_by_one(lengths: dict[int, int], width: int) -> tuple[Tensor, SlotCache]:
    cache, hidden = fed_cache(lengths), []
    for slot, length in lengths.items():
        for step in range(width):
            hidden.append(run(cache, [slot], [length + step], 1, [])[0])
    return torch.cat(hidden), cache


LAYOUTS = {
    "one slot": {4: 20},
    "equal lengths": {2: 11, 3: 11, 4: 11},
    "other lengths": {2: 11, 3: 30, 4: 1},
    "idle slots between": {1: 11, 2: 7, 4: 19},
    "idle slots between equal lengths": {1: 11, 2: 11, 4: 11},
    "far apart, gathered": {0: 13, 8: 22},
}


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_many_slots_equal_rows_fed_one_by_one(layout: str, width: int) -> None:
    lengths = LAYOUTS[layout]
    cache = fed_cache(lengths)
    hidden_ND, routes_NLK = run(cache, list(lengths), list(lengths.values()), width, [])
    expected_ND, expected_cache = one_by_one(lengths, width)
    torch.testing.assert_close(hidden_ND, expected_ND, atol=2e-5, rtol=1e-5)
    assert routes_NLK.shape == (len(hidden_ND), TINY.num_layers, TINY.experts_per_token)
    for name in ("keys_LSGdC", "values_LSGCd"):
        torch.testing.assert_close(
            getattr(cache, name), getattr(expected_cache, name), atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize("width", [1, 3])
def test_a_prompt_beside_decoding_slots_changes_neither(width: int) -> None:
    lengths = {2: 11, 3: 30}
    cache = fed_cache(lengths)
    span = PrefillSpan(6, 0, 17, 2 * width)
    hidden_ND, _ = run(cache, list(lengths), list(lengths.values()), width, [span])
    decoded_ND, _ = one_by_one(lengths, width)
    prompt_ND, _ = run(fed_cache({}), [], [], 1, [PrefillSpan(6, 0, 17, 0)])
    expected_ND = torch.cat([decoded_ND, prompt_ND])
    torch.testing.assert_close(hidden_ND, expected_ND, atol=2e-5, rtol=1e-5)


def test_a_prompt_in_pieces_equals_the_prompt_at_once() -> None:
    whole, pieces = fed_cache({}), fed_cache({})
    hidden_ND, _ = run(whole, [], [], 1, [PrefillSpan(5, 0, 40, 0)])
    parts = [
        run(pieces, [], [], 1, [PrefillSpan(5, start, end, 0)])[0]
        for start, end in ((0, 1), (1, 2), (2, 30), (30, 40))
    ]
    torch.testing.assert_close(torch.cat(parts), hidden_ND, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(pieces.keys_LSGdC, whole.keys_LSGdC, atol=2e-5, rtol=1e-5)


def test_a_cache_of_other_precision_takes_rows_of_one_slot() -> None:
    rounded = SlotCache(TINY, SLOTS, POSITIONS, torch.bfloat16)
    exact = SlotCache(TINY, SLOTS, POSITIONS)
    for cache in (rounded, exact):
        run(cache, [], [], 1, [PrefillSpan(3, 0, 20, 0)])
    difference = run(rounded, [3], [20], 4, [])[0] - run(exact, [3], [20], 4, [])[0]
    assert 0 < difference.abs().max() < 0.3
