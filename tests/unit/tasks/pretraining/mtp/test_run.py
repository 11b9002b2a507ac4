"""The MTP stage on a tiny corpus: drafts come to agree with the main head and the trunk stays as it
is.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.infra.platform.cluster.workspace import ProgressWriter, Workspace
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint import load_checkpoint, save_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.pretraining.mtp.config import MtpConfig, MtpRequest, MtpResult
from ostinato.tasks.pretraining.mtp.run import main, open_model
from tests.fakes.corpus import write_corpus
from tests.fakes.small_spec import SMALL_SPEC


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def checkpoint(corpus: Path) -> Path:
    """Fresh weights with a peaked output, so that there is something to agree with."""
    weights = build_trainer_model(SMALL_SPEC, seed=0).export_weights()
    weights["model.embed_tokens.weight"] *= 20
    return save_checkpoint(
        corpus / "start", SMALL_SPEC, weights, tokenizer_path=corpus / "tokenizer.json"
    )


def run_stage(corpus: Path, checkpoint: Path, directory: Path, **changes: Any) -> MtpResult:
    phase = {"name": "mtp", "blend": {"code": (1, 1), "demonstrations": (1, 1)}, "tokens": 256 * 25}
    shape = {
        "sequence_tokens": 64,
        "microbatch_tokens": 256,
        "global_batch_tokens": 256,
        "muon_learning_rate": 0.03,
    }
    fields = {"phases": [phase | shape], "hidden_size": 32, "evaluation_row_tokens": 32} | changes
    request = MtpRequest(
        config=MtpConfig.model_validate(fields),
        corpus_directory=str(corpus),
        checkpoint_directory=str(checkpoint),
    )
    directory.mkdir(exist_ok=True)
    return main(request, Workspace(directory, Settings(home=directory), ProgressWriter(directory)))


def test_mtp_lowers_kl_at_every_depth_and_leaves_the_trunk(
    corpus: Path, checkpoint: Path, tmp_path: Path
) -> None:
    result = run_stage(corpus, checkpoint, tmp_path / "run")
    for before, after in zip(result.before.kl_nats, result.after.kl_nats, strict=True):
        assert after < 0.8 * before
    for before, after in zip(result.before.agreement, result.after.agreement, strict=True):
        assert after > before
    ours, start = (
        load_checkpoint(Path(path)) for path in (result.checkpoint_directory, checkpoint)
    )
    assert ours.spec.mtp_depth == 2
    assert ours.spec.mtp_hidden_size == 32
    trunk = [name for name in start.weights if not name.startswith("model.mtp.")]
    assert all(torch.equal(ours.weights[name], start.weights[name]) for name in trunk)
    assert ours.tokenizer_path is not None


def test_mtp_keeps_draft_layers_of_the_same_shape(corpus: Path, checkpoint: Path) -> None:
    phase = {"name": "mtp", "blend": {"code": (1, 1)}, "tokens": 4096}
    config = MtpConfig.model_validate(
        {"phases": [phase], "depth": 1, "hidden_size": SMALL_SPEC.mtp_hidden_size}
    )
    request = MtpRequest(
        config=config, corpus_directory=str(corpus), checkpoint_directory=str(checkpoint)
    )
    weights = open_model(request).export_weights()
    start = load_checkpoint(checkpoint).weights
    assert torch.equal(weights["model.mtp.0.in_proj.weight"], start["model.mtp.0.in_proj.weight"])
    assert "model.mtp.1.in_proj.weight" not in weights
