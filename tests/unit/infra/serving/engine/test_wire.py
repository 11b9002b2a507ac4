"""Round trips of the wire form."""

import numpy as np

from ostinato.infra.serving.engine.wire import (
    decode_generation,
    decode_request,
    encode_generation,
    encode_request,
)
from ostinato.models.decode.protocol import GenerateRequest, Generation, Priority, StopReason


def test_a_request_survives_the_wire() -> None:
    request = GenerateRequest(
        "r", "s", (1, 2, 3), 7, (6,), 0.5, 0.9, 2**60, Priority.USER, False, 12, ((4, 5),)
    )
    assert decode_request(encode_request(request)) == request


def test_a_generation_survives_the_wire() -> None:
    generation = Generation(
        request_id="r",
        token_ids=(4, 5),
        logprobs_T=np.array([-0.5, -1.5], dtype=np.float32),
        weight_versions_T=np.array([3, 4]),
        routed_experts=np.arange(24, dtype=np.int16).reshape(3, 4, 2),
        route_offset=11,
        stop_reason=StopReason.CONTEXT,
        queued_seconds=0.25,
        generate_seconds=1.5,
        draft_tokens_proposed=8,
        draft_tokens_accepted=3,
    )
    again = decode_generation(encode_generation(generation))
    for name in Generation.__slots__:
        np.testing.assert_array_equal(getattr(again, name), getattr(generation, name), err_msg=name)
