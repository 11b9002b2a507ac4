"""`ostinato status`: finished and stopped stages are told apart, and a stopped one says what continues it."""

from pathlib import Path

from ostinato.flows.status_report import collect
from ostinato.infra.platform.cluster.workspace import (
    PROGRESS,
    PUBLISHED,
    RESULT,
    Progress,
)
from ostinato.infra.platform.settings import Settings


def test_collect_finished_and_stopped_stages(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    done = tmp_path / "runs" / "nano-seed0" / "problems-abc"
    stopped = tmp_path / "runs" / "nano-seed0" / "corpus-def"
    without_child = tmp_path / "runs" / "nano-seed0" / "cycle-123"
    for directory in (done, stopped, without_child):
        directory.mkdir(parents=True)
    (done / RESULT).write_text("{}")
    (without_child / PUBLISHED).write_text("cycle/nano@1")
    progress = Progress(done=3, total=7, message="documents", metrics={}, at=0.0)
    (stopped / PROGRESS).write_text(progress.model_dump_json())

    rows = {row[1]: row for row in collect(settings)}

    assert rows["problems-abc"][2] == rows["cycle-123"][2] == "finished"
    assert rows["corpus-def"][2:4] == ("stopped", "the same command again")
    assert rows["corpus-def"][5] == "3/7 documents"
