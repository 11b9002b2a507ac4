"""Laws of packing: everything arrives once, unchanged, in a known shape."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.transcript import SamplingDistribution
from ostinato.infra.platform.errors import TrainingError
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.batches.packing import (
    NODE_QUANTUM,
    pack,
    trainable_length,
)
from ostinato.tasks.reinforcement.learning.config import PackingConfig
from tests.unit.tasks.reinforcement.learning.samples import make_sample

CONFIG = PackingConfig(bucket_tokens=(8, 16, 32), microbatch_tokens=64)
APART = CONFIG.model_copy(update={"shares_prefixes": False})


def samples_of(lengths: list[int]):
    return [
        make_sample(
            index,
            list(range(1, length + 1)),
            [position > 0 and position % 2 == 0 for position in range(length)],
            logprobs=[-0.01 * position for position in range(length)],
        )
        for index, length in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 32), max_size=40), st.sampled_from([CONFIG, APART]))
@settings(deadline=None)
def test_pack_every_sample_is_in_exactly_one_row_unchanged(
    lengths: list[int], config: PackingConfig
) -> None:
    samples = samples_of(lengths)
    batches = pack(samples, [float(index) for index in range(len(samples))], config)
    seen = np.concatenate([batch.sample_indices_B for batch in batches]) if batches else []
    assert sorted(seen) == list(range(len(samples)))
    for batch in batches:
        for row, index in enumerate(batch.sample_indices_B):
            segment = samples[index].segment
            length = trainable_length(segment)
            assert batch.tokens_BT[row, :length].tolist() == segment.token_ids_T[:length].tolist()
            assert batch.loss_mask_BT[row].sum() == segment.sampled_tokens
            assert batch.rollout_logprobs_BT[row, :length] == pytest.approx(
                segment.logprobs_T[:length]
            )
            assert batch.padding_BT[row].sum() == batch.tokens_BT.shape[1] - length
            assert batch.advantages_B[row] == index


@given(st.lists(st.integers(1, 32), min_size=1, max_size=40))
@settings(deadline=None)
def test_pack_shapes_are_buckets_within_budget_costliest_first(lengths: list[int]) -> None:
    batches = pack(samples_of(lengths), [0.0] * len(lengths), APART)
    shapes = [batch.tokens_BT.shape for batch in batches]
    assert all(tokens in CONFIG.bucket_tokens and rows * tokens <= 64 for rows, tokens in shapes)
    costs = [batch.cost for batch in batches]
    assert costs == sorted(costs, reverse=True)
    assert sum(rows * tokens < 64 for rows, tokens in shapes) <= 1


def begun_alike(groups: list[tuple[int, int, int]]) -> list[Sample]:
    """Groups of (samples, tokens in common, tokens of each alone), one sample of each group in turn."""
    samples = []
    for attempt in range(max(count for count, _, _ in groups)):
        for number, (count, common, alone) in enumerate(groups):
            if attempt < count:
                own = range(100 + 20 * attempt, 100 + 20 * attempt + alone)
                tokens = [number, *range(10, 10 + common - 1), *own]
                mask = [position >= common for position in range(len(tokens))]
                samples.append(make_sample(len(samples), tokens, mask))
    return samples


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 12)), min_size=1))
@settings(deadline=None)
def test_pack_computes_what_samples_share_once_in_a_microbatch(
    groups: list[tuple[int, int, int]],
) -> None:
    samples = begun_alike(groups)
    batches = pack(samples, [0.0] * len(samples), CONFIG)
    for batch in batches:
        rows = [samples[index].segment.token_ids_T.tolist() for index in batch.sample_indices_B]
        beginnings = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
        assert batch.distinct_tokens == len(beginnings) <= max(64, batch.places)
        assert batch.places % NODE_QUANTUM == 0
        assert batch.places - len(beginnings) < NODE_QUANTUM
        assert batch.tokens_BT.size <= 8 * 64 or len(rows) == 1
    # a group is cut at most once more than it has to be
    most = sum(common + count * alone for count, common, alone in groups)
    again = 20 * len(batches)
    assert sum(batch.distinct_tokens for batch in batches) <= most + again


def test_pack_routes_that_differ_are_not_shared() -> None:
    first, second = begun_alike([(2, 6, 3)])
    routes = second.segment.routed_experts_TLK.copy()
    routes[4] = 1
    segment = second.segment.model_copy(update={"routed_experts_TLK": routes})
    other = second.model_copy(update={"segment": segment})
    assert pack([first, second], [0.0] * 2, CONFIG)[0].distinct_tokens == 6 + 2 * 3
    assert pack([first, other], [0.0] * 2, CONFIG)[0].distinct_tokens == 4 + 2 * (2 + 3)


def test_pack_sample_beyond_the_largest_bucket_has_a_multiple_of_it() -> None:
    batches = pack(samples_of([33, 97, 30]), [0.0] * 3, APART)
    assert [batch.tokens_BT.shape for batch in batches] == [(1, 128), (1, 64), (1, 32)]


def test_pack_sample_that_begins_sampled_is_an_error() -> None:
    with pytest.raises(TrainingError, match="wanted a prompt"):
        pack([make_sample(0, [1], [True])], [0.0], CONFIG)


def test_pack_tool_results_behind_the_last_sampled_token_take_no_place() -> None:
    config = PackingConfig(bucket_tokens=(8, 16))
    [sample] = samples_of([12])
    segment = sample.segment
    mask = np.zeros(40, dtype=bool)
    mask[:12] = segment.loss_mask_T
    mask[11] = True
    longer = {
        "token_ids_T": np.resize(segment.token_ids_T, 40),
        "loss_mask_T": mask,
        "logprobs_T": np.where(mask, -0.5, 0.0).astype(np.float32),
        "weight_versions_T": np.where(mask, 1, -1).astype(np.int64),
        "routed_experts_TLK": np.resize(
            segment.routed_experts_TLK, (40, *segment.routed_experts_TLK.shape[1:])
        ),
    }
    cut_short = sample.model_copy(update={"segment": segment.model_copy(update=longer)})
    [batch] = pack([cut_short], [1.0], config)
    assert batch.tokens_BT.shape[1] == 16
    assert batch.real_tokens == 12


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingDistribution(temperature=0.0),
        SamplingDistribution(top_p=0.9),
        SamplingDistribution(top_k=20),
    ],
)
def test_pack_refuses_samples_whose_support_was_truncated(sampling: SamplingDistribution) -> None:
    sample = make_sample(0, [1, 2, 3], [False, True, True], sampling=sampling)
    with pytest.raises(TrainingError, match=r"s0 was drawn at .*wanted the whole vocabulary"):
        pack([sample], [1.0], CONFIG)
