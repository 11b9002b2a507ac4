"""A pretraining child killed without warning ends, once started again, with the same weights."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import (
    PROGRESS,
    REQUEST,
    Progress,
    ProgressWriter,
    Workspace,
    make_envelope,
    read_record,
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
LONGEST_WAIT_SECONDS = 50


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
        {"phases": [phase], "evaluation_row_tokens": 32, "checkpoint_every_seconds": 0.1}
    )
    return PretrainingRequest(config=config, corpus_directory=str(corpus), spec=SMALL_SPEC)


def kill_at_step(request: PretrainingRequest, directory: Path, step: int) -> None:
    """Starts a child of its own and kills it once it has reported `step`."""
    directory.mkdir()
    replace_text(directory / REQUEST, make_envelope(ENTRY, request).model_dump_json())
    command = [
        sys.executable,
        "-m",
        "ostinato.infra.platform.cluster.child_main",
        ENTRY,
        str(directory),
    ]
    with (directory / "first.log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    try:
        while time.monotonic() < deadline:
            progress = read_record(directory / PROGRESS, Progress)
            if progress is not None and progress.done >= step:
                break
            assert child.poll() is None, (directory / "first.log").read_text()[-2000:]
            time.sleep(0.01)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()


@pytest.mark.timeout(180)  # three starts of a trainer
def test_pretraining_killed_and_started_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    request = make_request(write_corpus(tmp_path / "corpus"))
    kill_at_step(request, tmp_path / "killed", KILL_AT_STEP)
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
