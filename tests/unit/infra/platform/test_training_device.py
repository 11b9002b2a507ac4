"""Trainers live where the device module says: on a device that this machine has not (its tensors have
values, and anything made elsewhere fails) every stage computes what it computes on the CPU. The same
runs on a GPU with `-m gpu`.
"""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.infra.platform.cluster.workspace import ProgressWriter, Workspace
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.training_device import training_device
from ostinato.models.checkpoint import load_checkpoint, save_checkpoint
from ostinato.models.device import (
    CPU,
    CUDA_FROM_PARAMETERS,
    DeviceKind,
    choose_device,
    current_device,
    on_device,
    rank_device,
)
from ostinato.models.layout import ParallelLayout
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.process_groups import close_process_groups, open_process_groups
from ostinato.models.spec import ModelSpec
from ostinato.models.training.data_parallel import run_ranks
from ostinato.models.training.gradients import LayoutGradients
from ostinato.models.training.optimizer import build_optimizer
from ostinato.models.training.optimizer_config import OptimizerConfig
from ostinato.tasks.pretraining import run as pretraining_run
from ostinato.tasks.pretraining.config import PretrainingConfig, PretrainingRequest
from ostinato.tasks.pretraining.mtp import run as mtp_run
from ostinato.tasks.pretraining.mtp.config import MtpConfig, MtpRequest
from ostinato.tasks.records import Hint, Sample
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PackingConfig,
    PolicyOptimizerConfig,
)
from ostinato.tasks.reinforcement.learning.report import StepReport
from ostinato.tasks.reinforcement.learning.step import PolicyLearner
from tests.fakes.chosen_device import DEVICE, ChosenDevice, WrongDevice
from tests.fakes.corpus import write_corpus
from tests.unit.tasks.pretraining.test_layouts import FAMILIES
from tests.unit.tasks.reinforcement.learning.samples import TINY, random_samples

pytest_plugins = ["tests.fakes.process_groups"]
pytestmark = pytest.mark.usefixtures("closed_groups")

KINDS = [DEVICE.type, pytest.param("cuda", marks=pytest.mark.gpu)]
# a GPU sums in another order, as other layouts do: the tolerances of the layout laws
WEIGHTS = {"atol": 2e-4, "rtol": 1e-3}
FIGURES = 1e-4
SHAPE = {"sequence_tokens": 64, "microbatch_tokens": 192, "global_batch_tokens": 384}
PACKING = PackingConfig(bucket_tokens=(8, 16, 48), microbatch_tokens=96)
ADAMW = OptimizerConfig(kind="adamw", gradient_clip_norm=1.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def on(kind: DeviceKind) -> contextlib.AbstractContextManager[Any]:
    """Nothing may be made elsewhere, where the device is the made-up one."""
    return ChosenDevice(strict=True) if kind == DEVICE.type else contextlib.nullcontext()


def phase(steps: int) -> dict[str, Any]:
    blend = {"code": (0.5, 0.5), "demonstrations": (0.5, 0.5)}
    return {"name": "one", "blend": blend, "tokens": steps * SHAPE["global_batch_tokens"], **SHAPE}


def loop(steps: int, optimizer: OptimizerConfig) -> dict[str, Any]:
    return {
        "phases": [phase(steps)],
        "optimizer": optimizer,
        "evaluation_row_tokens": 32,
        "evaluation_tokens": 64,
        "checkpoint_every_seconds": 0.0,
    }


def workspace_in(directory: Path) -> Workspace:
    directory.mkdir(exist_ok=True)
    return Workspace(directory, Settings(home=directory), ProgressWriter(directory))


def pretrain(
    corpus: Path,
    directory: Path,
    spec: ModelSpec,
    kind: DeviceKind,
    *,
    start: Path | None = None,
    optimizer: OptimizerConfig = ADAMW,
) -> tuple[dict[str, torch.Tensor], float]:
    """Weights and perplexity after two steps."""
    request = PretrainingRequest(
        config=PretrainingConfig.model_validate(loop(2, optimizer)),
        corpus_directory=str(corpus),
        spec=None if start else spec,
        checkpoint_directory=str(start) if start else None,
    )
    given = (request, workspace_in(directory))
    with on(kind):
        result = run_ranks(pretraining_run.train_rank, given, ParallelLayout(), kind)
    weights = load_checkpoint(Path(result.checkpoint_directory)).weights
    return weights, result.after.perplexity


def check_weights(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, weight in wanted.items():
        assert seen[name].device == CPU
        torch.testing.assert_close(seen[name], weight, **WEIGHTS)


def save_start(corpus: Path, directory: Path, spec: ModelSpec) -> Path:
    """Fresh weights of the CPU: a GPU draws others."""
    weights = build_trainer_model(spec, seed=1).export_weights()
    close_process_groups()
    tokenizer = corpus / "tokenizer.json"
    return save_checkpoint(directory / "start", spec, weights, tokenizer_path=tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(1)
def test_pretraining_computes_the_same_on_the_chosen_device(
    name: str, kind: DeviceKind, corpus: Path, tmp_path: Path
) -> None:
    start = save_start(corpus, tmp_path, FAMILIES[name])

    wanted, perplexity = pretrain(corpus, tmp_path / "cpu", FAMILIES[name], "cpu", start=start)
    seen, seen_perplexity = pretrain(corpus, tmp_path / kind, FAMILIES[name], kind, start=start)

    check_weights(seen, wanted)
    assert seen_perplexity == pytest.approx(perplexity, rel=FIGURES)


def test_muon_and_fresh_weights_stay_on_the_chosen_device(corpus: Path, tmp_path: Path) -> None:
    muon = OptimizerConfig(kind="muon")

    wanted, _ = pretrain(corpus, tmp_path / "cpu", FAMILIES["nano"], "cpu", optimizer=muon)
    seen, _ = pretrain(corpus, tmp_path / "chosen", FAMILIES["nano"], "meta", optimizer=muon)

    check_weights(seen, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_point_of_the_device_goes_on_on_the_cpu(
    kind: DeviceKind, corpus: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    seen, _ = pretrain(corpus, directory, FAMILIES["nano"], kind)

    again, _ = pretrain(
        corpus, directory, FAMILIES["nano"], "cpu"
    )  # its last step is taken already

    check_weights(again, seen)


def build_with_drafts_of_the_cpu(*options: Any) -> TrainerModel:
    """A GPU draws others from the same seed."""
    model = build_trainer_model(*options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.draft.parameters():
            if weight.dim() > 1:  # norms begin as ones everywhere
                weight.copy_(torch.randn(weight.shape, generator=generator).mul_(0.05))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_draft_layers_learn_the_same_on_the_chosen_device(
    kind: DeviceKind, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "cuda":
        monkeypatch.setattr(mtp_run, "build_trainer_model", build_with_drafts_of_the_cpu)
    start = save_start(corpus, tmp_path, FAMILIES["nano"])
    config = MtpConfig.model_validate({**loop(1, ADAMW), "depth": 2, "hidden_size": 24})
    request = MtpRequest(
        config=config, corpus_directory=str(corpus), checkpoint_directory=str(start)
    )

    kl_nats = []
    for one in ("cpu", kind):
        given = (request, workspace_in(tmp_path / one))
        with on(one):
            run = run_ranks(mtp_run.train_rank, given, ParallelLayout(), one)
        kl_nats.append(run.after.kl_nats)

    assert kl_nats[1] == pytest.approx(kl_nats[0], rel=FIGURES)


def rl_samples() -> list[Sample]:
    """Drawn on the CPU; some with a hint, some of an older version."""
    model = build_trainer_model(TINY, seed=3)
    samples = random_samples(model, 7, seed=5, version=1)
    tokens = samples[0].segment.token_ids_T.tolist()
    hint = Hint(turn_start=2, turn_end=len(tokens), context_tokens=(*tokens[:2], 7, 9))
    mask_T = samples[0].segment.loss_mask_T.copy()
    segment = samples[0].segment.model_copy(update={"loss_mask_T": mask_T})
    samples[0] = samples[0].model_copy(update={"hint": hint, "segment": segment})
    return [*samples, *random_samples(build_trainer_model(TINY, seed=9), 2, seed=6, version=0)]


def rl_step(kind: DeviceKind, samples: list[Sample]) -> tuple[StepReport, list[float], Any]:
    """One step of the whole objective: replay, KL to a reference, hints, entropy, parity of versions."""
    config = LearningConfig(
        objective=ObjectiveConfig(
            loss_divisor_tokens=64,
            hint_coefficient=1.0,
            kl_coefficient=0.1,
            entropy_floor_nats=9.0,
            entropy_coefficient=0.01,
        ),
        packing=PACKING,
        optimizer=PolicyOptimizerConfig(kind="adamw", gradient_clip_norm=1.0),
    )
    start = build_trainer_model(TINY, seed=3).export_weights()
    older = build_trainer_model(TINY, seed=9).export_weights()
    close_process_groups()
    open_process_groups(kind=kind)
    with on(kind):
        model, reference = build_trainer_model(TINY), build_trainer_model(TINY)
        model.import_weights(start)
        reference.import_weights(older)
        optimizer = build_optimizer(model, config.optimizer)
        learner = PolicyLearner(model, optimizer, config, reference)
        k1_nats = learner.k1_to_reference(samples)
        earlier = {0: older.__getitem__}
        report = learner.step(samples, step=1, weight_version=1, earlier=earlier)
        return report, k1_nats, model.export_weights()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.nightly
def test_a_step_of_rl_computes_the_same_on_the_chosen_device(kind: DeviceKind) -> None:
    samples = rl_samples()

    wanted, wanted_k1, wanted_weights = rl_step("cpu", samples)
    seen, seen_k1, seen_weights = rl_step(kind, samples)

    assert seen.loss == pytest.approx(wanted.loss, rel=FIGURES)
    assert seen.gradient_norm == pytest.approx(wanted.gradient_norm, rel=FIGURES)
    assert seen.hint_kl_nats == pytest.approx(wanted.hint_kl_nats, rel=FIGURES)
    assert seen.entropy_nats == pytest.approx(wanted.entropy_nats, rel=FIGURES)
    assert seen_k1 == pytest.approx(wanted_k1, rel=FIGURES, abs=1e-5)
    check_weights(seen_weights, wanted_weights)


def test_gradients_of_several_ranks_are_summed_on_the_chosen_device() -> None:
    open_process_groups(kind="meta")
    with ChosenDevice(strict=True):
        model = build_trainer_model(TINY)
        gradients = LayoutGradients(model)
        tokens_BT = on_device(np.arange(12).reshape(2, 6))
        model.token_logprobs(tokens_BT).sum().backward()
        gradients.reduce()

    used = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert used
    assert {gradient.device for gradient in used} == {DEVICE}


def test_the_made_up_device_notices_what_is_made_elsewhere() -> None:
    open_process_groups(kind="meta")
    with ChosenDevice(strict=True):
        model: TrainerModel = build_trainer_model(TINY)
        assert {tensor.device for tensor in model.canonical_tensors().values()} == {DEVICE}
        with pytest.raises(WrongDevice, match=r"aten::zeros makes a tensor on the CPU"):
            torch.zeros(2)
        with pytest.raises(WrongDevice, match=r"meets tensors \[\(2,\)\] of the CPU"):
            model.head_VD[:2, 0] + torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("wanted", "num_parameters", "num_ranks", "found"),
    [
        ("auto", CUDA_FROM_PARAMETERS, 2, "cuda"),
        ("auto", CUDA_FROM_PARAMETERS - 1, 1, "cpu"),
        ("auto", CUDA_FROM_PARAMETERS, 3, "cpu"),
        ("cpu", CUDA_FROM_PARAMETERS, 1, "cpu"),
        ("cuda", 1, 2, "cuda"),
    ],
)
def test_auto_takes_gpus_for_large_models_where_every_rank_has_one(
    wanted: str, num_parameters: int, num_ranks: int, found: str
) -> None:
    numbers = {"num_parameters": num_parameters, "num_ranks": num_ranks, "num_gpus": 2}
    assert choose_device(wanted, **numbers) == found


def test_ranks_take_gpus_in_turn() -> None:
    assert rank_device("cuda", 1) == torch.device("cuda", 1)


def test_gpus_that_are_asked_for_and_missing_are_refused(tmp_path: Path) -> None:
    settings = Settings.model_validate({"home": tmp_path, "device": "cuda"})

    with pytest.raises(ConfigError, match=r"wanted one for each of the 1000 ranks"):
        training_device(settings, FAMILIES["nano"], 1000)


def test_groups_on_another_device_are_named() -> None:
    open_process_groups(kind="cpu")
    assert current_device() == CPU

    with pytest.raises(ValueError, match=r"open on 'cpu', wanted 'meta'; close them first"):
        open_process_groups(kind="meta")
