"""On a GPU: graphs replay what the eager engine computes. Never run yet: no GPU was at hand."""

import dataclasses

import numpy as np
import pytest

from ostinato.models.decode.config import EngineConfig
from ostinato.models.decode.engine import DecodeEngine
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.decode.static_passes import StaticPasses
from ostinato.models.decode.weights import Precision, prepare_weights
from tests.fakes.tiny_model import TINY, random_weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
# float32 on both sides, sums in another order; TF32 is off ("highest")
LOGPROB_TOLERANCE = 1e-4


def run(
    precision: Precision = Precision.FP32, swap_after: int = 0, **changes: object
) -> tuple[dict[str, Generation], DecodeEngine]:
    config = EngineConfig(slots=8, precision=precision, **changes)  # type: ignore[arg-type]
    weights = prepare_weights(TINY, random_weights(TINY), 0, precision, device=config.device)
    later = prepare_weights(TINY, random_weights(TINY, 1), 1, precision, device=config.device)
    engine = DecodeEngine(TINY, weights, config)
    for index in range(12):
        prompt = tuple(range(index, 2 * index + 2))
        request = GenerateRequest(f"r{index}", f"s{index}", prompt, 30, (), seed=index)
        engine.submit(dataclasses.replace(request, top_p=0.9 if index % 3 == 0 else 1.0))
    finished, steps = {}, 0
    while engine.has_work:
        finished |= {generation.request_id: generation for generation in engine.step()}
        steps += 1
        if steps == swap_after:
            engine.swap_weights(later)
    return finished, engine


def assert_same(got: dict[str, Generation], wanted: dict[str, Generation]) -> None:
    for name, expected in wanted.items():
        assert got[name].token_ids == expected.token_ids
        np.testing.assert_allclose(
            got[name].logprobs_T, expected.logprobs_T, atol=LOGPROB_TOLERANCE
        )
        np.testing.assert_array_equal(got[name].weight_versions_T, expected.weight_versions_T)


def test_graphs_replay_the_samples_of_the_cpu() -> None:
    assert_same(run(device="cuda")[0], run()[0])


def test_graphs_and_plain_launches_are_one_step() -> None:
    assert_same(run(device="cuda")[0], run(device="cuda", cuda_graphs=False)[0])


def test_a_swap_in_flight_needs_no_second_capture() -> None:
    swapped, engine = run(device="cuda", swap_after=8)
    assert_same(swapped, run(swap_after=8)[0])
    assert isinstance(engine._passes, StaticPasses)
    plain = run(device="cuda")[1]._passes
    assert isinstance(plain, StaticPasses)
    assert len(engine._passes.buckets) == len(plain.buckets)


def test_drafts_inside_the_graph_change_no_sample() -> None:
    assert_same(run(device="cuda", speculation_depth=2)[0], run()[0])


def test_bfloat16_products_by_expert_are_captured() -> None:
    graphs = run(Precision.BF16, device="cuda")[0]
    assert_same(graphs, run(Precision.BF16, device="cuda", cuda_graphs=False)[0])
