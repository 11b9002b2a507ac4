"""Progress that a child writes: parts that follow one another at once are all seen, and a fast loop writes seldom."""

from pathlib import Path

import pytest

from ostinato.infra.platform.cluster import workspace
from ostinato.infra.platform.cluster.workspace import PROGRESS, Progress, ProgressWriter


def shown(directory: Path) -> Progress:
    return Progress.model_validate_json((directory / PROGRESS).read_bytes())


def test_a_long_part_is_shown_although_the_parts_before_it_took_no_time(tmp_path: Path) -> None:
    progress = ProgressWriter(tmp_path)
    for done, part in enumerate(("collecting", "distilling", "training")):
        progress.update(done, 3, part)
        assert shown(tmp_path).message == part


def test_a_fast_loop_is_written_ten_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written = [0.0], []
    monkeypatch.setattr(workspace.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(workspace, "replace_text", lambda _, text: written.append(text))
    progress = ProgressWriter(tmp_path)
    for step in range(5_000):  # five seconds
        now[0] = step / 1_000
        progress.update(step, 10_000, f"step {step}")
    assert 45 <= len(written) <= 60
    progress.update(10_000, 10_000, "done")
    assert "done" in written[-1]
