"""Groups for a trainer whose answers an embedded engine sampled."""

from collections.abc import Sequence

from ostinato.infra.agent.loop.segments import SegmentBuilder
from ostinato.infra.agent.transcript import SamplingDistribution
from ostinato.models.decode.engine import DecodeEngine
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.tasks.records import Sample
from tests.fakes.engine_runs import run_in_order


def sample_answers(
    engine: DecodeEngine, prompts: Sequence[list[int]], new_tokens: int
) -> list[Sample]:
    """One group for a trainer: an answer to each prompt, rewarded where its number is odd."""
    requests = [
        GenerateRequest(str(index), str(index), tuple(prompt), new_tokens, (), seed=index)
        for index, prompt in enumerate(prompts)
    ]
    samples = []
    for index, generation in enumerate(run_in_order(engine, requests)):
        builder = SegmentBuilder(prompts[index], SamplingDistribution())
        builder.append_generation(generation)
        samples.append(
            Sample(
                sample_id=str(index),
                trajectory_id=str(index),
                group_id="g",
                segment=builder.build(),
                advantage=1.0 if index % 2 else -1.0,
                reward=1.0,
            )
        )
    return samples
