"""A pretraining child killed without warning ends, once started again, with the same weights."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import (
    REQUEST,
    ProgressWriter,
    Workspace,
    make_envelope,
    replace_text,
)
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint import load_checkpoint
from ostinato.tasks.pretraining.config import (
    PretrainingConfig,
    PretrainingRequest,
    PretrainingResult,
)
from ostinato.tasks.pretraining.run import main
from tests.fakes.corpus import write_corpus
from tests.fakes.small_spec import SMALL_SPEC

ENTRY = "ostinato.tasks.pretraining.run:main"
KILL_AT_STEP = 12
DYING_CHILD = """
import os, signal, sys
from pathlib import Path
from ostinato.infra.platform.cluster import child_main
from ostinato.infra.platform.cluster.workspace import ProgressWriter

report = ProgressWriter.update

def report_and_die(writer, done, *others, **metrics):
    report(writer, done, *others, **metrics)
    if done >= int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

ProgressWriter.update = report_and_die
child_main.main(sys.argv[1], Path(sys.argv[2]))
"""


def make_request(corpus: Path) -> PretrainingRequest:
    phase = {
        "name": "bulk",
        "blend": {"code": (1, 0), "library": (0, 1)},
        "tokens": 256 * 50,
        "sequence_tokens": 64,
        "microbatch_tokens": 256,
        "global_batch_tokens": 256,
    }
    config = PretrainingConfig.model_validate(
        {"phases": [phase], "evaluation_row_tokens": 32, "checkpoint_every_seconds": 0.02}
    )
    return PretrainingRequest(config=config, corpus_directory=str(corpus), spec=SMALL_SPEC)


def die_at_step(request: PretrainingRequest, directory: Path) -> None:
    """A child that is killed when it has reported its step."""
    directory.mkdir()
    replace_text(directory / REQUEST, make_envelope(ENTRY, request).model_dump_json())
    command = [sys.executable, "-c", DYING_CHILD, ENTRY, str(directory), str(KILL_AT_STEP)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


@pytest.mark.timeout(400)  # three starts of a trainer
@pytest.mark.nightly
def test_pretraining_killed_and_started_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    request = make_request(write_corpus(tmp_path / "corpus"))
    die_at_step(request, tmp_path / "killed")
    result = run_child(ENTRY, request, PretrainingResult, directory=tmp_path / "killed")
    assert result.times_resumed == 1
    (tmp_path / "plain").mkdir()
    settings = Settings(home=tmp_path)
    workspace = Workspace(tmp_path / "plain", settings, ProgressWriter(tmp_path / "plain"))
    plain = main(request, workspace)
    ours, wanted = (
        load_checkpoint(Path(run.checkpoint_directory)).weights for run in (result, plain)
    )
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
