"""Token record of a conversation: parallel arrays, whatever kind of model answered."""

from dataclasses import replace

import numpy as np
import pytest

from ostinato.infra.agent.loop.segments import SegmentBuilder
from ostinato.infra.agent.transcript import SamplingDistribution
from ostinato.infra.platform.errors import EngineError
from ostinato.models.decode.protocol import Generation, StopReason

ANSWER = Generation(
    request_id="r",
    token_ids=(4, 5),
    logprobs_T=np.array([-0.5, -0.25], dtype=np.float32),
    weight_versions_T=np.zeros(2, dtype=np.int64),
    routed_experts=np.zeros((4, 0, 0), dtype=np.int16),
    route_offset=0,
    stop_reason=StopReason.STOP_TOKEN,
)


def test_a_model_without_experts_leaves_a_segment_without_routes() -> None:
    builder = SegmentBuilder([1, 2, 3], SamplingDistribution())
    builder.append_generation(ANSWER)
    segment = builder.build()
    assert segment.token_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert segment.logprobs_T.tolist() == [0, 0, 0, -0.5, -0.25]
    assert segment.routed_experts_TLK.shape == (5, 0, 0)


@pytest.mark.parametrize(
    "odd",
    [
        {"logprobs_T": np.array([-0.5, np.nan])},
        {"logprobs_T": np.array([-np.inf, -0.5])},
        {"logprobs_T": np.array([-0.5])},
        {"logprobs_T": np.array(["-0.5", "-0.5"])},
        {"logprobs_T": None},
        {"weight_versions_T": np.zeros(3, dtype=np.int64)},
        {"weight_versions_T": np.array([0.0, np.nan])},
        {"token_ids": (4, -1)},
        {"token_ids": (4, 2**40)},
        {"token_ids": (4, "5")},
        {"token_ids": (4, 5.0)},
    ],
)
def test_an_odd_answer_of_an_engine_is_refused_by_request_field_and_value(odd: dict) -> None:
    builder = SegmentBuilder([1, 2, 3], SamplingDistribution())
    with pytest.raises(EngineError, match=f"answer r of the engine has {next(iter(odd))}"):
        builder.append_generation(replace(ANSWER, **odd))
    assert builder.token_ids == [1, 2, 3]
