"""Draft layers in RL: they follow the trunk, and the trunk does not feel it."""

from pathlib import Path
from statistics import mean

import pytest
import torch

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.decode.weights import prepare_weights
from ostinato.models.network.build import build_trainer_model
from ostinato.models.spec import ModelSpec
from ostinato.models.training.drafts import draft_divergence
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PackingConfig,
    PolicyOptimizerConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from tests.fakes.small_spec import make_spec
from tests.unit.tasks.reinforcement.learning.samples import TINY, random_samples

DRAFTED = make_spec(
    32, 16, heads=(2, 1, 16), experts=(4, 2, 16), max_sequence_tokens=64, drafts=(2, 8)
)
MTP = "model.mtp."
Weights = dict[str, torch.Tensor]


def open_trainer(
    directory: Path, spec: ModelSpec = DRAFTED, *, kind: str = "adamw", trains_drafts: bool = True
) -> RLTrainer:
    """A trainer from random weights whose gradients are clipped at every step."""
    start = directory / "start"
    if not start.exists():
        weights = build_trainer_model(spec, seed=3).export_weights()
        weights["model.embed_tokens.weight"] *= 20  # a peaked output: something to agree with
        save_checkpoint(start, spec, weights)
    optimizer = {
        "kind": kind,
        "learning_rate": 3e-3,
        "muon_learning_rate": 0.02,
        "gradient_clip_norm": 1e-3,
    }
    request = TrainerRequest(
        config=LearningConfig(
            optimizer=PolicyOptimizerConfig.model_validate(optimizer),
            objective=ObjectiveConfig(loss_divisor_tokens=64),
            packing=PackingConfig(bucket_tokens=(16, 40), microbatch_tokens=160),
            trains_drafts=trains_drafts,
        ),
        checkpoint_directory=str(start),
        work_directory=str(directory / "work"),
        chain_id="run",
    )
    return RLTrainer(request, ObjectStore.from_url(f"file://{directory}/objects"))


def take_steps(trainer: RLTrainer, seeds: range, temperature: float = 1.0) -> list:
    """Draft KL of each step."""
    sampler = build_trainer_model(DRAFTED, seed=3)
    return [
        trainer.step(
            random_samples(sampler, 6, seed=seed, temperature=temperature, alike_share=0)
        ).draft_kl_nats
        for seed in seeds
    ]


@torch.no_grad()
def measure_kl(weights: Weights) -> float:
    """Of the draft layers to the trunk beside them, on random tokens."""
    model = build_trainer_model(DRAFTED)
    model.import_weights(weights)
    tokens_BT = torch.randint(0, 32, (8, 40), generator=torch.Generator().manual_seed(7))
    hidden_TBD, mask_BT = model.forward_hidden(tokens_BT), torch.ones_like(tokens_BT).bool()
    return float(draft_divergence(model, hidden_TBD, tokens_BT, mask_BT).mean())


def part(weights: Weights, *, is_draft: bool) -> Weights:
    return {name: one for name, one in weights.items() if name.startswith(MTP) == is_draft}


def is_equal(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.nightly
def test_draft_layers_follow_a_trunk_that_is_the_one_without_them(
    tmp_path: Path, kind: str
) -> None:
    ours = open_trainer(tmp_path / "ours", kind=kind)
    frozen = open_trainer(tmp_path / "frozen", kind=kind, trains_drafts=False)
    begun = frozen.export_weights()
    kl_nats = take_steps(ours, range(12), temperature=1.3)
    assert take_steps(frozen, range(12), temperature=1.3) == [None] * 12
    followed, plain = ours.export_weights(), frozen.export_weights()
    assert is_equal(part(followed, is_draft=False), part(plain, is_draft=False))
    assert not is_equal(part(plain, is_draft=False), part(begun, is_draft=False))
    assert is_equal(part(plain, is_draft=True), part(begun, is_draft=True))
    assert mean(kl_nats[-4:]) < 0.8 * mean(kl_nats[:4])
    assert measure_kl(followed) < 0.8 * measure_kl(plain)


def test_engines_get_the_draft_layers_of_each_version(tmp_path: Path) -> None:
    trainer = open_trainer(tmp_path)
    subscriber = ChainSubscriber(ObjectStore.from_url(f"file://{tmp_path}/objects"), "run")
    before = prepare_weights(DRAFTED, subscriber.fetch(0), 0)
    take_steps(trainer, range(1))
    trainer.publish()
    fetched = subscriber.fetch(1)
    assert is_equal(fetched, trainer.export_weights())
    after = prepare_weights(DRAFTED, fetched, 1)
    for old, new in zip(before.drafts, after.drafts, strict=True):
        assert not (old.gate_up == new.gate_up).all()


def test_a_killed_trainer_goes_on_with_the_draft_layers_it_saved(tmp_path: Path) -> None:
    whole = open_trainer(tmp_path / "whole")
    take_steps(whole, range(5))
    first = open_trainer(tmp_path / "killed")
    take_steps(first, range(2))
    first.save()
    take_steps(first, range(90, 91))  # lost with the process
    second = open_trainer(tmp_path / "killed")
    take_steps(second, range(2, 5))
    assert is_equal(second.export_weights(), whole.export_weights())


def test_a_checkpoint_without_draft_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"which has no draft layers, wanted mtp\.depth"):
        open_trainer(tmp_path, TINY)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"rank": 2}},
        {"world_size": 2, "layout": {"tensor": 2}, "parity": {"earlier_versions": 0}},
        {"world_size": 2, "layout": {"expert": 2}, "parity": {"earlier_versions": 0}},
    ],
)
def test_settings_that_draft_layers_cannot_learn_under_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match=r"trains_drafts is [tT]rue"):
        LearningConfig.model_validate({"trains_drafts": True, **changes})
