"""Pictures of a stage under way never reach the stage: not when the server is away, not when they cannot be drawn."""

import logging
import time
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from ostinato.flows.stages import progress
from ostinato.flows.stages.artifacts import link_to_plots
from ostinato.flows.stages.progress import shown_pictures
from ostinato.infra.platform.cluster.workspace import METRICS
from ostinato.infra.platform.settings import Settings


@pytest.mark.parametrize("line", ['{"step":1,"loss":2.0}', '{"step":1,"loss":"two"}'])
def test_what_cannot_be_shown_is_logged_and_tried_again(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def away(png: bytes, key: str, description: str, _: UUID | None) -> UUID:
        tried.append(key)
        assert description.endswith("[plots](/)")
        if len(tried) == 1:
            raise ConnectionError("the server is away")
        return uuid4()

    monkeypatch.setattr(progress, "refresh_image", away)
    directory = tmp_path / "toy-seed0" / "pretrained-0"
    directory.mkdir(parents=True)
    (directory / METRICS).write_text(f"{line}\n")
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(progress, "PICTURE_SECONDS", 0.05)
    deadline = time.monotonic() + 60
    with shown_pictures("pretraining", directory, "[plots](/)"):
        while len(tried) < 2 and caplog.text.count("not_shown") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert "not_shown" in caplog.text
    assert tried == (["toy-seed0-pretraining-loss"] * 2 if "two" not in line else [])


def test_stage_without_metrics_has_none_and_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> UUID:
        raise AssertionError

    monkeypatch.setattr(progress, "refresh_image", never)
    with shown_pictures("problems", tmp_path, ""):
        pass


def test_a_link_names_the_run_on_the_dashboard_of_the_home(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, dashboard_port=9_001)
    directory = tmp_path / "runs" / "toy-seed0" / "reinforced-0"
    address = "http://127.0.0.1:9001/#runs?run=toy-seed0%2Freinforced-0"
    assert link_to_plots(directory, settings) == f"[plots of reinforced-0]({address})"
