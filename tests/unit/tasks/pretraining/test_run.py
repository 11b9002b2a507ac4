"""The pretraining stage on a tiny corpus: it learns, resumes exactly, and does not depend on the
number of ranks.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ostinato.flows.reporting.run_report import codebase_rows
from ostinato.infra.platform.cluster.workspace import ProgressWriter, Workspace
from ostinato.infra.platform.errors import ConfigError, TrainingError
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.checkpoint.adapter_files import ADAPTER
from ostinato.models.network.build import TrainerModel
from ostinato.models.rendering import Renderer
from ostinato.models.rendering.vocabulary import CONTROL_TOKENS
from ostinato.models.training.batch import RowSource, TokenBatch
from ostinato.models.training.schedule import Loss
from ostinato.tasks.pretraining import run as run_module
from ostinato.tasks.pretraining.config import (
    PretrainingConfig,
    PretrainingRequest,
    PretrainingResult,
)
from ostinato.tasks.pretraining.run import main, next_token_loss
from tests.fakes.corpus import write_corpus, write_transcripts
from tests.fakes.small_spec import SMALL_SPEC


class Interrupted(Exception):
    """Stands for the end of the process."""


class InterruptingProgress(ProgressWriter):
    """Fails at a step, after what came before it was saved."""

    def __init__(self, directory: Path, at_step: int) -> None:
        super().__init__(directory)
        self.at_step = at_step

    def update(
        self, done: float, total: float, message: str = "", **metrics: float | int | str
    ) -> None:
        super().update(done, total, message, **metrics)
        if done == self.at_step:
            raise Interrupted


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def make_request(corpus: Path, **changes: Any) -> PretrainingRequest:
    shape = {"sequence_tokens": 64, "microbatch_tokens": 128, "global_batch_tokens": 256}
    phases = [
        {"name": "bulk", "blend": {"code": (1, 0), "library": (0, 1)}, "tokens": 256 * 12, **shape},
        {
            "name": "sft",
            "blend": {"demonstrations": (0.7, 0.7), "code": (0.3, 0.3)},
            "tokens": 256 * 6,
            **shape,
        },
    ]
    config = {
        "phases": phases,
        "evaluation_row_tokens": 32,
        "checkpoint_every_seconds": 0.0,
    } | changes
    return PretrainingRequest(
        config=PretrainingConfig.model_validate(config),
        corpus_directory=str(corpus),
        spec=SMALL_SPEC,
    )


def make_workspace(directory: Path, progress: ProgressWriter | None = None) -> Workspace:
    directory.mkdir(exist_ok=True)
    return Workspace(directory, Settings(home=directory), progress or ProgressWriter(directory))


def read_weights(result: PretrainingResult) -> dict[str, torch.Tensor]:
    return load_checkpoint(Path(result.checkpoint_directory)).weights


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> PretrainingResult:
    return main(make_request(corpus), make_workspace(tmp_path_factory.mktemp("plain")))


def test_pretraining_lowers_perplexity_and_reports_phases(plain: PretrainingResult) -> None:
    assert plain.after.perplexity < 0.5 * plain.before.perplexity
    assert [(phase.name, phase.steps, phase.tokens) for phase in plain.phases] == [
        ("bulk", 12, 3072),
        ("sft", 6, 1536),
    ]
    assert plain.phases[1].target_tokens < plain.phases[1].tokens
    assert [evaluation.step for evaluation in plain.evaluations] == [0, 12, 18]
    assert plain.times_resumed == 0


def test_bits_per_byte_are_the_same_loss_over_the_bytes_of_the_text(
    corpus: Path, plain: PretrainingResult
) -> None:
    renderer = Renderer.load(corpus)
    tokens, num_bytes = 0, 0
    for name in ("code", "library"):
        source = RowSource(corpus / "shards" / f"{name}_heldout", 32, seed=0)
        for row in range(source.rows_per_epoch):
            token_ids = source.row(row).tolist()[1:]
            tokens += len(token_ids)
            words = [item for item in token_ids if item >= len(CONTROL_TOKENS)]
            num_bytes += len(renderer.decode(words).encode())
    assert plain.after.bits_per_byte is not None
    bits = tokens * math.log2(plain.after.perplexity)
    assert plain.after.bits_per_byte * num_bytes == pytest.approx(bits)


def test_without_phases_the_checkpoint_stays_as_it_is_and_is_measured(
    corpus: Path, tmp_path: Path, plain: PretrainingResult
) -> None:
    request = make_request(corpus, phases=()).model_copy(
        update={"spec": None, "checkpoint_directory": plain.checkpoint_directory}
    )
    result = main(request, make_workspace(tmp_path / "run"))
    kept, given = read_weights(result), read_weights(plain)
    assert kept.keys() == given.keys()
    assert all(torch.equal(kept[name], given[name]) for name in given)
    assert result.phases == ()
    assert result.before == result.after
    assert result.before.perplexity == pytest.approx(plain.after.perplexity)
    assert [row.note for row in codebase_rows(result)] == ["no phase: as it was"]


@pytest.mark.parametrize("at_step", [5, 12, 15])
@pytest.mark.sampled(1)
def test_pretraining_interrupted_ends_with_the_same_weights(
    corpus: Path, tmp_path: Path, plain: PretrainingResult, at_step: int
) -> None:
    request, directory = make_request(corpus), tmp_path / "run"
    directory.mkdir()
    with pytest.raises(TrainingError, match="Interrupted"):
        main(request, make_workspace(directory, InterruptingProgress(directory, at_step)))
    result = main(request, make_workspace(directory))
    assert result.times_resumed == 1
    assert (result.before, result.after) == (plain.before, plain.after)
    ours, wanted = read_weights(result), read_weights(plain)
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


@pytest.mark.nightly
def test_transcripts_left_out_are_told_after_a_resume_in_a_later_phase(
    corpus: Path, tmp_path: Path
) -> None:
    shape = {"sequence_tokens": 64, "microbatch_tokens": 64, "global_batch_tokens": 64}
    phases = [
        {"name": "sft", "blend": {"demonstrations": (1, 1)}, "tokens": 128, **shape},
        {"name": "bulk", "blend": {"code": (1, 1)}, "tokens": 128, **shape},
    ]
    own = shutil.copytree(corpus, tmp_path / "corpus")
    write_transcripts(
        own / "demonstrations.safetensors", [([2] * 10, [1] * 10), ([3] * 70, [1] * 70)]
    )
    request, directory = make_request(own, phases=phases), tmp_path / "run"
    with pytest.raises(TrainingError, match="Interrupted"):
        main(request, make_workspace(directory, InterruptingProgress(directory, 3)))
    result = main(request, make_workspace(directory))
    assert result.times_resumed == 1
    assert result.transcripts_too_long == 1


def test_loss_that_is_no_number_ends_the_run_and_the_last_checkpoint_goes_on(
    corpus: Path, tmp_path: Path, plain: PretrainingResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, workspace = make_request(corpus), make_workspace(tmp_path / "run")
    microbatches = 0

    def poisoned(model: TrainerModel, draft_weight: float | None = None) -> Loss:
        loss = next_token_loss(model, draft_weight)

        def spoil(batch: TokenBatch, hidden_TBD: torch.Tensor) -> tuple[torch.Tensor, int]:
            nonlocal microbatches
            microbatches += torch.is_grad_enabled()  # perplexity is measured without
            nats, targets = loss(batch, hidden_TBD)
            return nats * (float("nan") if microbatches == 2 * 5 + 1 else 1.0), targets

        return spoil

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "next_token_loss", poisoned)
        with pytest.raises(
            TrainingError,
            match="gradient norm is nan at step 6 of phase 'bulk', wanted a finite one; the weights were not changed",
        ):
            main(request, workspace)
    result = main(request, workspace)
    assert result.times_resumed == 1
    ours, wanted = read_weights(result), read_weights(plain)
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


@pytest.mark.nightly
def test_pretraining_resume_point_of_another_request_is_ignored(
    corpus: Path, tmp_path: Path
) -> None:
    workspace = make_workspace(tmp_path / "run")
    main(make_request(corpus, seed=1), workspace)
    assert main(make_request(corpus, seed=2), workspace).times_resumed == 0


def test_pretraining_on_two_ranks_equals_one(
    corpus: Path, tmp_path: Path, plain: PretrainingResult
) -> None:
    result = main(make_request(corpus, world_size=2), make_workspace(tmp_path / "run"))
    ours, wanted = read_weights(result), read_weights(plain)
    for name in wanted:
        # gradients are summed in another order; Muon's bf16 products magnify that
        torch.testing.assert_close(ours[name], wanted[name], atol=2e-3, rtol=1e-2)
    assert result.after.perplexity == pytest.approx(plain.after.perplexity, rel=1e-2)


def test_pretraining_continues_a_checkpoint(
    corpus: Path, tmp_path: Path, plain: PretrainingResult
) -> None:
    config = make_request(corpus).config
    request = PretrainingRequest(
        config=config, corpus_directory=str(corpus), checkpoint_directory=plain.checkpoint_directory
    )
    result = main(request, make_workspace(tmp_path / "run"))
    assert result.before.perplexity == pytest.approx(plain.after.perplexity)


def test_pretraining_without_corpus_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        main(make_request(tmp_path / "nowhere"), make_workspace(tmp_path / "run"))


def test_pretraining_request_needs_exactly_one_start(corpus: Path) -> None:
    config = make_request(corpus).config
    with pytest.raises(ValueError, match="exactly one"):
        PretrainingRequest(config=config, corpus_directory=str(corpus))


def test_pretraining_ranks_must_divide_the_microbatches(corpus: Path) -> None:
    with pytest.raises(
        ValueError, match="2 microbatches per step, wanted a multiple of 3 data-parallel ranks"
    ):
        make_request(corpus, world_size=3)


def adapting(corpus: Path, plain: PretrainingResult, **changes: Any) -> PretrainingRequest:
    plain_config = make_request(corpus).config.model_dump()
    return PretrainingRequest(
        config=PretrainingConfig.model_validate(plain_config | {"lora": {"rank": 4}} | changes),
        corpus_directory=str(corpus),
        checkpoint_directory=plain.checkpoint_directory,
    )


@pytest.mark.nightly
def test_adapters_interrupted_end_with_the_same_weights_and_are_kept_apart(
    corpus: Path, tmp_path: Path, plain: PretrainingResult
) -> None:
    request, directory = adapting(corpus, plain), tmp_path / "run"
    directory.mkdir()
    with pytest.raises(TrainingError, match="Interrupted"):
        main(request, make_workspace(directory, InterruptingProgress(directory, 5)))
    resumed = main(request, make_workspace(directory))
    whole = main(request, make_workspace(tmp_path / "whole"))
    assert resumed.times_resumed == 1
    ours, wanted = read_weights(resumed), read_weights(whole)
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    start = read_weights(plain)
    moved = {name for name in wanted if not torch.equal(wanted[name], start[name])}
    assert moved
    assert all("self_attn" in name for name in moved)  # the rest of this shape is experts
    adapter = load_file(Path(whole.checkpoint_directory) / ADAPTER / "adapter_model.safetensors")
    assert len(adapter) == 2 * len(moved)


def test_adapters_without_a_base_or_cut_over_ranks_are_refused(
    corpus: Path, plain: PretrainingResult
) -> None:
    with pytest.raises(ValueError, match="wanted base_checkpoint"):
        make_request(corpus, lora={"rank": 4})
    with pytest.raises(ValueError, match="adapters are not split over ranks"):
        adapting(corpus, plain, layout={"tensor": 2}, world_size=2)
