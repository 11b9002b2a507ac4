"""Token record of a conversation: parallel arrays, whatever kind of model answered."""

import numpy as np

from ostinato.infra.agent.loop.segments import SegmentBuilder
from ostinato.infra.agent.transcript import SamplingDistribution
from ostinato.models.decode.protocol import Generation, StopReason


def test_a_model_without_experts_leaves_a_segment_without_routes() -> None:
    builder = SegmentBuilder([1, 2, 3], SamplingDistribution())
    builder.append_generation(
        Generation(
            request_id="r",
            token_ids=(4, 5),
            logprobs_T=np.array([-0.5, -0.25], dtype=np.float32),
            weight_versions_T=np.zeros(2, dtype=np.int64),
            routed_experts=np.zeros((4, 0, 0), dtype=np.int16),
            route_offset=0,
            stop_reason=StopReason.STOP_TOKEN,
        )
    )
    segment = builder.build()
    assert segment.token_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert segment.logprobs_T.tolist() == [0, 0, 0, -0.5, -0.25]
    assert segment.routed_experts_TLK.shape == (5, 0, 0)
