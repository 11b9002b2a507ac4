"""Pictures of a stage under way on a server of Prefect: one of each plot, in the place of the last."""

import time
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from ostinato.flows.stages import progress
from ostinato.flows.stages.progress import shown_pictures
from ostinato.infra.platform.cluster.workspace import METRICS
from ostinato.infra.platform.telemetry import MetricsLog


def images(key: str) -> list[dict]:
    """Those of a key, newest first, as the server has them."""
    with get_client(sync_client=True) as client:
        wanted = {"artifacts": {"key": {"any_": [key]}}, "sort": "UPDATED_DESC"}
        return client.request("POST", "/artifacts/filter", json=wanted).json()


@pytest.mark.usefixtures("prefect_server")
def test_a_stage_under_way_has_a_picture_of_each_plot_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PICTURE_SECONDS", 0.2)
    directory = tmp_path / "toy-seed0" / "reinforced-0"
    log = MetricsLog(directory / METRICS)
    key = "toy-seed0-reinforcement-solve-rate"
    found: list[dict] = []

    def step(number: int) -> None:
        log.append(number, {"solve_rate": 0.1 * number, "groups": 8, "entropy_nats": 0.5})

    @flow
    def train() -> None:
        with shown_pictures("reinforcement", directory, "[plots](http://here/)"):
            step(1)
            deadline = time.monotonic() + 60
            while not found and time.monotonic() < deadline:
                found.extend(images(key))
                time.sleep(0.2)
            step(2)

    train()
    [before], [after] = found, images(key)
    assert (before["type"], before["id"]) == ("markdown", after["id"])
    assert before["data"].startswith("![picture](data:image/png;base64,")
    assert before["data"] != after["data"]
    assert "Both lines rise" in after["description"]
    assert after["description"].endswith("[plots](http://here/)")
    assert after["flow_run_id"] is not None
    assert len(images("toy-seed0-reinforcement-entropy")) == 1
