"""`ostinato gc`: what is published, superseded or copied goes; what lives, serves or tells of a run stays."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.infra.platform.cluster.processes import mark_process
from ostinato.infra.platform.cluster.workspace import LOG, METRICS, PROCESS, PUBLISHED


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    return tmp_path


def fill(directory: Path, *names: str) -> Path:
    """A directory with files of these names that are older than any limit."""
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).write_text("x" * 10)
        os.utime(directory / name, (1.0, 1.0))
    os.utime(directory, (1.0, 1.0))
    return directory


def left(home: Path) -> set[str]:
    runs = home / "runs" / "nano-seed0"
    return {str(path.relative_to(runs)) for path in runs.rglob("*") if path.is_file()}


def gc(*arguments: str) -> str:
    answer = CliRunner().invoke(app, ["gc", *arguments], catch_exceptions=False)
    assert answer.exit_code == 0
    return answer.stdout


def test_published_and_superseded_work_goes_and_its_story_stays(home: Path) -> None:
    runs = home / "runs" / "nano-seed0"
    fill(runs / "pretrained-a", PUBLISHED, LOG, METRICS, "model.safetensors")
    fill(runs / "pretrained-b", LOG, "model.safetensors")
    fill(runs / "pretrained-b.superseded-c", "model.safetensors")
    before = left(home)
    assert "2 items, 20 bytes" in gc("--dry-run")
    assert left(home) == before
    gc()
    assert left(home) == {
        f"pretrained-a/{PUBLISHED}",
        f"pretrained-a/{LOG}",
        f"pretrained-a/{METRICS}",
        f"pretrained-b/{LOG}",
        "pretrained-b/model.safetensors",
    }


def test_young_work_and_that_of_a_live_process_stays(home: Path) -> None:
    runs = home / "runs" / "nano-seed0"
    live = fill(runs / "pretrained-a", PUBLISHED, "model.safetensors")
    (live / PROCESS).write_text(mark_process(os.getpid()).model_dump_json())
    young = fill(runs / "pretrained-b", PUBLISHED)
    (young / "model.safetensors").write_text("x")
    copied = fill(home / "artifacts" / "pretrained" / "f", "model.safetensors")
    before = left(home)
    gc()
    assert left(home) == before
    assert copied.exists()  # the live stage may read it


def test_copies_go_when_nothing_runs(home: Path) -> None:
    copied = fill(home / "artifacts" / "pretrained" / "f", "model.safetensors")
    other = fill(home / "artifacts" / "mine" / "f", "notes")
    gc()
    assert not copied.exists()
    assert other.exists()
