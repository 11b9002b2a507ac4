"""Samples as the rollout stage makes them, drawn from a tiny model."""

import numpy as np
import torch

from ostinato.infra.agent.transcript import MISSING_ROUTE, SamplingDistribution, Segment
from ostinato.models.network.build import TrainerModel
from ostinato.models.spec import ModelSpec
from ostinato.tasks.records import Sample
from tests.fakes.logits import forward_logits
from tests.fakes.small_spec import make_spec

TINY = make_spec(24, 16, heads=(2, 1, 8), experts=(4, 2, 8), max_sequence_tokens=64)


def make_sample(
    index: int,
    tokens: list[int],
    mask: list[bool],
    *,
    advantage: float = 1.0,
    logprobs: list[float] | None = None,
    versions: list[int] | None = None,
    cache_version: int | None = None,
    group_id: str = "g",
    spec: ModelSpec = TINY,
    sampling: SamplingDistribution | None = None,
) -> Sample:
    """A sample with live routes; log-probabilities and versions are 0 where not given."""
    is_sampled = np.array(mask, dtype=bool)
    given = np.array(logprobs if logprobs is not None else [0.0] * len(tokens), dtype=np.float32)
    version = np.array(versions if versions is not None else [0] * len(tokens), dtype=np.int64)
    cache = version if cache_version is None else np.full(len(tokens), cache_version)
    return Sample(
        sample_id=f"s{index}",
        trajectory_id=f"t{index}",
        group_id=group_id,
        segment=Segment(
            token_ids_T=np.array(tokens, dtype=np.int32),
            loss_mask_T=is_sampled,
            logprobs_T=np.where(is_sampled, given, 0).astype(np.float32),
            weight_versions_T=np.where(is_sampled, version, -1),
            cache_versions_T=np.where(is_sampled, cache, -1),
            routed_experts_TLK=np.full(
                (len(tokens), spec.num_layers, spec.experts_per_token), MISSING_ROUTE, np.int16
            ),
            sampling=sampling or SamplingDistribution(),
        ),
        advantage=advantage,
        reward=advantage,
    )


def random_samples(
    model: TrainerModel,
    count: int,
    seed: int,
    temperature: float = 1.0,
    version: int = 0,
    alike_share: float = 0.6,
    **fields,
) -> list[Sample]:
    """Random tokens of random lengths with the model's own log-probabilities, about half of them sampled. A share
    of them begins as others do.
    """
    generator = np.random.default_rng(seed)
    samples: list[Sample] = []
    for index in range(count):
        length = int(generator.integers(3, 40))
        tokens = generator.integers(0, model.spec.vocab_size, length)
        if samples and alike_share and generator.random() < alike_share:
            begun = samples[generator.integers(len(samples))].segment.token_ids_T
            shared = int(generator.integers(1, 1 + min(length, len(begun))))
            tokens[:shared] = begun[:shared]
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        with torch.no_grad():
            logits = forward_logits(model, torch.from_numpy(tokens)[None])[0, :-1] / temperature
        drawn = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(tokens[1:, None]))[:, 0]
        advantage = float(generator.normal())
        samples.append(
            make_sample(
                index,
                tokens.tolist(),
                mask.tolist(),
                logprobs=[0.0, *drawn.tolist()],
                spec=model.spec,
                versions=[version] * length,
                sampling=SamplingDistribution(temperature=temperature),
                **{"advantage": advantage, **fields},
            )
        )
    return samples
