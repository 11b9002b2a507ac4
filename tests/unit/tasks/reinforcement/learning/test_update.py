"""Laws of one optimiser step: it is the gradient it says it is, whatever the layout."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ostinato.infra.platform.errors import TrainingError
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.training import allocator
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PackingConfig,
    PolicyOptimizerConfig,
    RouterReplayConfig,
)
from ostinato.tasks.reinforcement.learning.parity import choose_samples
from ostinato.tasks.reinforcement.learning.report import StepReport
from ostinato.tasks.reinforcement.learning.step import PolicyLearner
from tests.fakes.logits import forward_logits
from tests.unit.tasks.reinforcement.learning.samples import TINY, make_sample, random_samples

PACKING = PackingConfig(bucket_tokens=(8, 16, 40), microbatch_tokens=160)


def make_config(**fields) -> LearningConfig:
    defaults = {
        "objective": ObjectiveConfig(loss_divisor_tokens=64),
        "packing": PACKING,
        "optimizer": PolicyOptimizerConfig(gradient_clip_norm=None),
    }
    return LearningConfig(**{**defaults, **fields})


class KeepGradients(torch.optim.SGD):
    """Moves nothing; keeps what it was given."""

    kept: tuple[torch.Tensor, ...] = ()

    def step(self, closure=None) -> None:
        weights = self.param_groups[0]["params"]
        self.kept = tuple(w.grad.clone() for w in weights if w.grad is not None)


def run_step(model: TrainerModel, samples, config: LearningConfig | None = None, **fields):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    update = PolicyLearner(model, optimizer, config or make_config())
    return update.step(samples, **{"step": 1, "weight_version": 0, **fields})


def gradients(samples, config: LearningConfig | None = None) -> tuple[torch.Tensor, ...]:
    """What the optimiser is given."""
    model = build_trainer_model(TINY, seed=3)
    optimizer = KeepGradients(model.parameters(), lr=1.0)
    update = PolicyLearner(model, optimizer, config or make_config())
    update.step(samples, step=1, weight_version=0)
    return optimizer.kept


def draw(count: int = 9, **fields):
    return random_samples(build_trainer_model(TINY, seed=3), count, seed=5, **fields)


def assert_close(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    # fp32 sums in another order: 2e-5 of the largest element is some 200 roundings
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        assert float((one - other).abs().max()) <= 2e-5 * float(other.abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_step_is_the_plain_policy_gradient(temperature: float) -> None:
    samples = draw(temperature=temperature)
    model = build_trainer_model(TINY, seed=3)
    loss = torch.zeros(())
    for sample in samples:
        tokens = torch.from_numpy(sample.segment.token_ids_T.astype(np.int64))
        logits = forward_logits(model, tokens[None])[0] / temperature
        logprobs = torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0]
        mask = torch.from_numpy(sample.segment.loss_mask_T[1:])
        loss = loss - sample.advantage * logprobs[mask].sum() / 64
    loss.backward()
    assert_close(gradients(samples), [w.grad for w in model.parameters() if w.grad is not None])
    assert run_step(build_trainer_model(TINY, seed=3), samples).parity.one_cache.k3_nats < 1e-9


@pytest.mark.parametrize(
    "packing",
    [
        PackingConfig(bucket_tokens=(40,), microbatch_tokens=1),
        PackingConfig(bucket_tokens=(64,), microbatch_tokens=10_000),
        PackingConfig(bucket_tokens=(4, 8, 12, 20, 40), microbatch_tokens=80),
        PACKING.model_copy(update={"shares_prefixes": False}),
    ],
)
def test_step_does_not_depend_on_microbatches_padding_or_order(packing: PackingConfig) -> None:
    samples = draw()
    assert_close(gradients(samples[::-1], make_config(packing=packing)), gradients(samples))


def test_step_skipping_zero_advantage_changes_nothing() -> None:
    samples = draw()
    samples += [sample.model_copy(update={"advantage": 0.0}) for sample in draw(4)]
    objective = ObjectiveConfig(loss_divisor_tokens=64, skip_zero_advantage=False)
    assert_close(gradients(samples), gradients(samples, make_config(objective=objective)))


def test_step_equal_rewards_leave_the_weights_and_the_optimiser_alone() -> None:
    model = build_trainer_model(TINY, seed=3)
    before = model.export_weights()
    report = run_step(model, draw(advantage=0.0))
    assert not report.is_updated
    assert report.samples_zero_advantage == 9
    assert (report.computed_tokens, report.shared_ratio, report.padding_ratio) == (0, 0.0, 0.0)
    assert all(tensor.equal(before[name]) for name, tensor in model.export_weights().items())


def test_step_without_a_sampled_token_leaves_momentum_alone() -> None:
    """Also where the loss has a KL term, which gives every sampled token a gradient."""
    model, reference = (build_trainer_model(TINY, seed=seed) for seed in (3, 4))
    objective = ObjectiveConfig(
        loss_divisor_tokens=64, kl_coefficient=0.1, kl_estimator="k3_in_loss"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    update = PolicyLearner(model, optimizer, make_config(objective=objective), reference)
    assert update.step(draw(), step=1, weight_version=0).is_updated
    before = model.export_weights()
    empty = [make_sample(0, [1, 2, 3], [False] * 3), make_sample(1, [1], [False])]
    assert not update.step(empty, step=2, weight_version=1).is_updated
    assert all(tensor.equal(before[name]) for name, tensor in model.export_weights().items())


def test_step_report_shows_no_mismatch_for_the_models_own_logprobs() -> None:
    report = run_step(build_trainer_model(TINY, seed=3), draw())
    parity = report.parity
    assert parity.one_cache is not None
    assert parity.one_cache.k3_nats < 1e-9
    assert parity.tokens_by_age == {0: report.sampled_tokens}
    assert (parity.kept_cache, parity.tokens_not_measured, parity.alarms()) == (None, 0, [])
    assert 0 < report.entropy_nats <= np.log(TINY.vocab_size) + 1e-5


def test_tokens_of_an_earlier_version_are_compared_under_its_weights() -> None:
    old, new = build_trainer_model(TINY, seed=9), build_trainer_model(TINY, seed=3)
    samples = random_samples(old, 6, seed=1, version=4) + random_samples(new, 3, seed=2, version=5)
    before = new.export_weights()
    update = PolicyLearner(new, KeepGradients(new.parameters(), lr=1), make_config())

    def step(served: TrainerModel) -> StepReport:
        earlier = {4: served.export_weights().__getitem__}
        return update.step(samples, step=1, weight_version=5, earlier=earlier)

    report = step(old)
    assert report.staleness.histogram == {0: 3, 1: 6}
    assert report.mismatch_all.k3_nats > 1e-3
    assert report.parity.one_cache is not None
    assert report.parity.one_cache.k3_nats < 1e-9
    assert sum(report.parity.tokens_by_age.values()) == report.sampled_tokens
    assert report.parity.alarms() == []
    assert all(tensor.equal(before[name]) for name, tensor in new.export_weights().items())
    # an engine that said version 4 and served other weights
    ((cache, wrong, limit),) = step(build_trainer_model(TINY, seed=11)).parity.alarms()
    assert (cache, limit) == ("one", 1e-6)
    assert wrong.k3_nats > 1e-3


def test_tokens_of_unknown_weights_are_not_measured_instead_of_perfect() -> None:
    model = build_trainer_model(TINY, seed=3)
    samples = random_samples(build_trainer_model(TINY, seed=9), 6, seed=1, version=2)
    report = run_step(model, samples, weight_version=5)
    assert report.parity.one_cache is None
    assert report.parity.tokens_by_age == {}
    assert report.parity.tokens_not_measured == report.sampled_tokens
    assert report.mismatch_without_replay is None
    assert "parity_one_cache_k3_nats" not in report.metrics()


def test_a_bounded_number_of_earlier_tokens_is_compared_other_ones_each_step() -> None:
    samples = random_samples(build_trainer_model(TINY, seed=9), 40, seed=1, version=4)
    picked = [choose_samples(samples, 4, 50, salt=step) for step in range(2)]
    for some in picked:
        assert 50 <= sum(sample.segment.sampled_tokens for sample in some) < 90
    assert {s.sample_id for s in picked[0]} != {s.sample_id for s in picked[1]}


def test_a_cache_kept_over_a_swap_is_measured_apart() -> None:
    model = build_trainer_model(TINY, seed=3)
    kept = random_samples(build_trainer_model(TINY, seed=9), 4, seed=1, cache_version=-1)
    report = run_step(model, [*draw(), *kept])
    assert report.parity.one_cache is not None
    assert report.parity.kept_cache is not None
    assert report.parity.one_cache.k3_nats < 1e-9 < 1e-3 < report.parity.kept_cache.k3_nats
    assert [cache for cache, _, _ in report.parity.alarms()] == ["kept"]


def test_step_without_a_finite_gradient_is_refused_before_the_weights_move() -> None:
    model = build_trainer_model(TINY, seed=3)
    before = model.export_weights()
    with pytest.raises(TrainingError, match="not changed"):
        run_step(model, draw(advantage=1e300))
    assert all(tensor.equal(before[name]) for name, tensor in model.export_weights().items())


def test_step_returns_freed_memory_to_the_kernel_once_it_is_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trims: list[int] = []
    usage = SimpleNamespace(uordblks=0, hblkhd=0)  # all resident memory is free
    library = SimpleNamespace(mallinfo2=lambda: usage, malloc_trim=trims.append)
    monkeypatch.setattr(allocator, "_glibc", lambda: library)
    model, samples = build_trainer_model(TINY, seed=3), draw()
    monkeypatch.setattr(allocator, "_KEPT_SHARE", 1.0)
    run_step(model, samples)
    assert trims == []
    monkeypatch.setattr(allocator, "_KEPT_SHARE", 0.0)
    run_step(model, samples)
    assert trims == [0]


def test_k3_in_the_loss_is_its_own_gradient_at_every_sampled_token() -> None:
    samples = [sample.model_copy(update={"advantage": 0.0}) for sample in draw(4)] + draw(3)
    objective = ObjectiveConfig(
        loss_divisor_tokens=64, kl_coefficient=0.5, kl_estimator="k3_in_loss"
    )
    config = make_config(objective=objective)
    policy, reference = build_trainer_model(TINY, seed=3), build_trainer_model(TINY, seed=4)
    loss = torch.zeros(())
    for sample in samples:
        tokens = torch.from_numpy(sample.segment.token_ids_T.astype(np.int64))
        scored = []
        for model in (policy, reference):
            logits = forward_logits(model, tokens[None])[0]
            scored.append(torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0])
        mask = torch.from_numpy(sample.segment.loss_mask_T[1:])
        logprobs, log_ratio = scored[0][mask], (scored[1].detach() - scored[0])[mask]
        k3 = log_ratio.exp() - 1 - log_ratio
        loss = loss + (0.5 * k3.sum() - sample.advantage * logprobs.sum()) / 64
    loss.backward()
    expected = [w.grad for w in policy.parameters() if w.grad is not None]
    model = build_trainer_model(TINY, seed=3)
    optimizer = KeepGradients(model.parameters(), lr=1.0)
    update = PolicyLearner(model, optimizer, config, reference)
    report = update.step(samples, step=1, weight_version=0)
    assert_close(optimizer.kept, expected)
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-4)


def test_k1_of_the_sampling_policy_is_zero_and_of_another_is_not() -> None:
    samples = draw()
    config = make_config()

    def k1_of(seed: int) -> list[float]:
        model, reference = build_trainer_model(TINY, seed=3), build_trainer_model(TINY, seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return PolicyLearner(model, optimizer, config, reference).k1_to_reference(samples)

    same = k1_of(3)
    assert same == pytest.approx([0.0] * len(samples), abs=1e-4)
    other = k1_of(4)
    assert max(abs(value) for value in other) > 1e-2


def sample_answers(model: TrainerModel, count: int, seed: int, wanted: int):
    """A bandit: the prompt is token 0, the answer one token, the reward 1 for `wanted`."""
    with torch.no_grad():
        logprobs = torch.log_softmax(forward_logits(model, torch.tensor([[0, 0]]))[0, 0], -1)
    generator = torch.Generator().manual_seed(seed)
    answers = torch.multinomial(logprobs.exp(), count, replacement=True, generator=generator)
    rewards = [float(answer == wanted) for answer in answers.tolist()]
    mean = sum(rewards) / count
    samples = [
        make_sample(i, [0, a], [False, True], advantage=r - mean, logprobs=[0, float(logprobs[a])])
        for i, (a, r) in enumerate(zip(answers.tolist(), rewards, strict=True))
    ]
    return samples, mean


def test_steps_on_a_bandit_raise_the_reward() -> None:
    model = build_trainer_model(TINY, seed=3)
    config = make_config(objective=ObjectiveConfig(loss_divisor_tokens=64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    update = PolicyLearner(model, optimizer, config)
    rewards = []
    for step in range(16):
        samples, reward = sample_answers(model, 48, seed=step, wanted=7)
        rewards.append(reward)
        update.step(samples, step=step, weight_version=step)
    assert np.mean(rewards[:3]) < 0.2
    assert np.mean(rewards[-3:]) > 0.8


def test_mismatch_without_replay_is_measured_when_asked_and_changes_nothing() -> None:
    samples = draw()
    plain = make_config()
    asked = make_config(router_replay=RouterReplayConfig(compared_tokens=10_000))
    report = run_step(build_trainer_model(TINY, seed=3), samples, asked)
    without = report.mismatch_without_replay
    assert without is not None
    assert without.tokens == report.parity.one_cache.tokens > 0
    assert_close(gradients(samples, asked), gradients(samples, plain))
    assert run_step(build_trainer_model(TINY, seed=3), samples).mismatch_without_replay is None


def with_foreign_routes(model: TrainerModel, sample: Sample) -> Sample:
    """The sample as an engine with other routes would have made it: fixed experts, log-probs on them."""
    segment = sample.segment
    routes_TLK = np.zeros_like(segment.routed_experts_TLK)
    routes_TLK[..., 0], routes_TLK[..., 1] = 3, 1
    with torch.no_grad():
        logprobs_T = model.token_logprobs(
            torch.from_numpy(segment.token_ids_T.astype(np.int64))[None],
            torch.from_numpy(routes_TLK)[None],
            plausibility_ratio=0.0,
        )[0].numpy()
    return sample.model_copy(
        update={
            "segment": segment.model_copy(
                update={
                    "routed_experts_TLK": routes_TLK,
                    "logprobs_T": np.where(segment.loss_mask_T, logprobs_T, 0).astype(np.float32),
                }
            )
        }
    )


def test_replay_of_foreign_routes_shows_in_the_mismatch_without_it() -> None:
    """Log-probs taken on routes that the router would not choose agree only where those are replayed."""
    model = build_trainer_model(TINY, seed=3)
    samples = random_samples(model, 6, seed=5)
    asked = make_config(
        router_replay=RouterReplayConfig(compared_tokens=10_000, plausibility_ratio=0.0)
    )
    foreign = [with_foreign_routes(model, sample) for sample in samples]
    report = run_step(model, foreign, asked)
    assert report.mismatch_without_replay is not None
    assert report.parity.one_cache.k3_nats < 1e-9
    assert report.mismatch_without_replay.k3_nats > 1e-6


def test_entropy_floor_holds_a_bandit_open() -> None:
    def last_entropy(floor_nats: float | None) -> tuple[float, float]:
        model = build_trainer_model(TINY, seed=3)
        objective = ObjectiveConfig(
            loss_divisor_tokens=64, entropy_floor_nats=floor_nats, entropy_coefficient=1.0
        )
        config = make_config(objective=objective)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        update = PolicyLearner(model, optimizer, config)
        reports = [
            update.step(
                sample_answers(model, 48, seed=step, wanted=7)[0], step=step, weight_version=step
            )
            for step in range(16)
        ]
        assert reports[0].entropy_coefficient == 0  # nearly uniform: above any floor here
        used = sum(report.entropy_coefficient > 0 for report in reports)
        assert (used > 0) == (floor_nats is not None)
        return float(np.mean([report.entropy_nats for report in reports[-3:]])), used

    closed, _ = last_entropy(None)
    held, used = last_entropy(1.0)
    assert closed < 0.4 < 0.8 < held
    assert used < 16
