"""Engine and trainer are one policy: mismatch KL at equal weights, over turns, batches, swaps and
speculation.
"""

import numpy as np
import pytest
import torch

from ostinato.infra.agent.loop.segments import SegmentBuilder
from ostinato.infra.agent.transcript import SamplingDistribution, Segment
from ostinato.models.decode.config import Precision
from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.decode.weights import prepare_weights
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.tasks.reinforcement.learning.config import PARITY_ALARM_K3
from ostinato.tasks.reinforcement.learning.report import measure_mismatch
from tests.fakes.engine_runs import run
from tests.fakes.nano_spec import NANO

SPEC = NANO.model_copy(update={"max_sequence_tokens": 160, "rope_scaling_factor": 2.0})
LIMIT_K3 = 1e-6  # float32 on CPU: rounding only


def make_trainer(seed: int) -> TrainerModel:
    """Weights with sharp routers, norms off one and a peaked output, as after training."""
    trainer = build_trainer_model(SPEC, seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    weights = trainer.export_weights()
    for name, weight in weights.items():
        if "norm" in name or "bias" in name:
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
        if name.endswith(("mlp.gate.weight", "embed_tokens.weight")):
            weight.mul_(6)
    trainer.import_weights(weights)
    return trainer


@pytest.fixture(scope="module")
def trainer() -> TrainerModel:
    return make_trainer(0)


def sample_segments(
    engine: DecodeEngine, attempts: int, turns: int, temperature: float = 1.0
) -> list[Segment]:
    """Plays attempts of several turns with made-up tool results, all attempts of a turn batched."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, SPEC.vocab_size, 17).tolist()
    drawn_from = SamplingDistribution(temperature=temperature)
    builders = {f"session-{index}": SegmentBuilder(prompt, drawn_from) for index in range(attempts)}
    for turn in range(turns):
        requests = [
            GenerateRequest(
                name, name, tuple(builder.token_ids), 14, (6,), temperature, seed=100 * turn + index
            )
            for index, (name, builder) in enumerate(builders.items())
        ]
        for name, generation in run(engine, requests).items():
            builders[name].append_generation(generation)
            builders[name].append_unsampled(
                rng.integers(0, SPEC.vocab_size, int(rng.integers(1, 9))).tolist()
            )
    return [builder.build() for builder in builders.values()]


def compare(
    segments: list[Segment], trainer: TrainerModel, *, with_routes: bool
) -> tuple[np.ndarray, np.ndarray]:
    length = max(len(segment.token_ids_T) for segment in segments)
    tokens_BT = torch.zeros(len(segments), length, dtype=torch.long)
    routes_BTLK = torch.full((len(segments), length, SPEC.num_layers, SPEC.experts_per_token), -1)
    mask_BT = np.zeros((len(segments), length), dtype=bool)
    sampled_BT = np.zeros((len(segments), length), dtype=np.float32)
    for row, segment in enumerate(segments):
        size = len(segment.token_ids_T)
        tokens_BT[row, :size] = torch.from_numpy(segment.token_ids_T.astype(np.int64))
        routes_BTLK[row, :size] = torch.from_numpy(segment.routed_experts_TLK.astype(np.int64))
        mask_BT[row, :size] = segment.loss_mask_T
        sampled_BT[row, :size] = segment.logprobs_T
    with torch.no_grad():
        logprobs_BT = trainer.token_logprobs(
            tokens_BT,
            routes_BTLK if with_routes else None,
            temperature_B=torch.tensor([segment.sampling.temperature for segment in segments]),
        ).numpy()
    return logprobs_BT[mask_BT], sampled_BT[mask_BT]


@pytest.mark.timeout(300)  # the first run on a machine compiles the native loops
@pytest.mark.parametrize("with_routes", [False, True])
@pytest.mark.parametrize("depth", [0, 2])
def test_sampled_tokens_have_the_trainers_logprobs(
    trainer: TrainerModel, depth: int, with_routes: bool
) -> None:
    weights = prepare_weights(SPEC, trainer.export_weights(), 0)
    config = EngineConfig(slots=8, prefill_tokens_per_step=48, draft_layers=depth)
    segments = sample_segments(DecodeEngine(SPEC, weights, config), attempts=12, turns=3)
    mismatch = measure_mismatch(*compare(segments, trainer, with_routes=with_routes))
    assert mismatch.tokens > 300
    assert mismatch.k3_nats <= LIMIT_K3
    assert mismatch.p99_ratio < 1.001


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_tempered_samples_have_the_trainers_tempered_logprobs(
    trainer: TrainerModel, temperature: float
) -> None:
    weights = prepare_weights(SPEC, trainer.export_weights(), 0)
    engine = DecodeEngine(SPEC, weights, EngineConfig(slots=8))
    segments = sample_segments(engine, attempts=8, turns=2, temperature=temperature)
    mismatch = measure_mismatch(*compare(segments, trainer, with_routes=True))
    assert mismatch.tokens > 150
    assert mismatch.k3_nats <= LIMIT_K3


def test_engine_in_bf16_stays_within_its_own_limit(trainer: TrainerModel) -> None:
    weights = prepare_weights(SPEC, trainer.export_weights(), 0, Precision.BF16)
    engine = DecodeEngine(SPEC, weights, EngineConfig(slots=8))
    segments = sample_segments(engine, attempts=12, turns=3)
    mismatch = measure_mismatch(*compare(segments, trainer, with_routes=True))
    assert LIMIT_K3 < mismatch.k3_nats < PARITY_ALARM_K3["local", Precision.BF16]


def test_routes_are_recorded_for_every_fed_position(trainer: TrainerModel) -> None:
    weights = prepare_weights(SPEC, trainer.export_weights(), 0)
    segments = sample_segments(
        DecodeEngine(SPEC, weights, EngineConfig(slots=8)), attempts=6, turns=3
    )
    for segment in segments:
        last_sampled = int(np.flatnonzero(segment.loss_mask_T)[-1])
        assert (segment.routed_experts_TLK[:last_sampled] >= 0).all()


def test_after_a_swap_new_sessions_match_the_new_trainer(trainer: TrainerModel) -> None:
    engine = DecodeEngine(
        SPEC, prepare_weights(SPEC, trainer.export_weights(), 0), EngineConfig(slots=8)
    )
    sample_segments(engine, attempts=4, turns=2)
    later = make_trainer(1)
    engine.swap_weights(prepare_weights(SPEC, later.export_weights(), 1))
    for index in range(4):
        engine.end_session(f"session-{index}")
    segments = sample_segments(engine, attempts=4, turns=2)
    assert measure_mismatch(*compare(segments, later, with_routes=False)).k3_nats <= LIMIT_K3
    assert measure_mismatch(*compare(segments, trainer, with_routes=False)).k3_nats > 1e-3


def test_a_cache_kept_over_a_swap_is_labelled_and_a_fresh_one_is_of_one_version(
    trainer: TrainerModel,
) -> None:
    engine = DecodeEngine(
        SPEC, prepare_weights(SPEC, trainer.export_weights(), 0), EngineConfig(slots=8)
    )
    sample_segments(engine, attempts=4, turns=2)
    later = make_trainer(1)
    engine.swap_weights(prepare_weights(SPEC, later.export_weights(), 1))
    engine.end_session("session-0")
    fresh, *kept = sample_segments(engine, attempts=4, turns=1)
    assert set(fresh.cache_versions_T[fresh.loss_mask_T]) == {1}
    for segment in kept:
        assert set(segment.weight_versions_T[segment.loss_mask_T]) == {1}
        assert set(segment.cache_versions_T[segment.loss_mask_T]) == {0}
    assert measure_mismatch(*compare([fresh], later, with_routes=True)).k3_nats <= LIMIT_K3
    assert measure_mismatch(*compare(kept, later, with_routes=True)).k3_nats > LIMIT_K3
