"""Trackers of other projects in their offline modes: what a stage and its resumption sent is read back from what the
library wrote. And MLflow's registry of models. Run by `.ci/trackers`, which installs the extras.
"""

import importlib
import json
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.infra.platform.artifacts import open_artifacts
from ostinato.infra.platform.cluster.child import child_environment
from ostinato.infra.platform.cluster.workspace import METRICS, REQUEST, RequestEnvelope
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import MetricsLog
from ostinato.infra.platform.tracking.forwarding import tracked
from ostinato.infra.platform.tracking.registries import (
    CHAMPION,
    CHECKPOINT,
    EXPORTED,
    WATCHER,
    register_champion,
    register_export,
)

pytestmark = pytest.mark.trackers
LIMIT_SECONDS = 60.0
GROUP, STAGE = "toy-seed0", "reinforced-1"
LOSSES = [(1, 2.0), (2, 1.5), (3, 1.25)]
OSTINATO = [sys.executable, "-P", "-c", "from ostinato.flows.cli import main; main()"]
_HEADER = struct.Struct("<IHB")  # checksum, length, type of a record in LevelDB's log format
_BLOCK = 32_768


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def settings_of(home: Path, *trackers: str) -> Settings:
    return Settings(home=home, trackers=trackers)


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def forward(settings: Settings) -> Path:
    """A stage of two steps, and its resumption by one more. Its workspace."""
    directory = settings.home / "runs" / GROUP / STAGE
    directory.mkdir(parents=True)
    request = {"learning": {"rate": 0.5}}
    envelope = RequestEnvelope(entry="tests:none", fingerprint="1", request=request)
    (directory / REQUEST).write_text(envelope.model_dump_json())
    log = MetricsLog(directory / METRICS)
    for steps in (LOSSES[:2], LOSSES[2:]):
        with tracked(directory, settings) as begin:
            begin()
            for step, loss in steps:
                log.append(step, {"loss": loss, "phase": "bulk"})
        wait_for(lambda num=steps[-1][0]: _offsets_are_whole(directory) and num)
    return directory


def _offsets_are_whole(directory: Path) -> bool:
    path, size = directory / "trackers.json", (directory / METRICS).stat().st_size
    offsets = json.loads(path.read_text())["offsets"] if path.exists() else {}
    return bool(offsets) and set(offsets.values()) == {size}


def test_mlflow_keeps_one_finished_run_with_its_numbers(tmp_path: Path) -> None:
    forward(settings_of(tmp_path, "mlflow"))
    client = mlflow_client(tmp_path)
    [experiment] = client.search_experiments(filter_string="name = 'ostinato'")
    wait_for(lambda: _run(client, experiment).info.status == "FINISHED")
    run = _run(client, experiment)
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((one.step, one.value) for one in history) == LOSSES
    assert run.data.params == {"learning.rate": "0.5"}
    assert run.info.run_name == f"{GROUP}/{STAGE}"


def _run(client: Any, experiment: Any) -> Any:
    [run] = client.search_runs([experiment.experiment_id])
    return run


def mlflow_client(home: Path) -> Any:
    uri = f"sqlite:///{home}/mlflow.db"
    return importlib.import_module("mlflow").MlflowClient(tracking_uri=uri, registry_uri=uri)


def test_wandb_writes_the_numbers_of_both_attempts_under_one_id(tmp_path: Path) -> None:
    forward(settings_of(tmp_path, "wandb"))
    wait_for(lambda: len(found := wandb_records(tmp_path)) > 0 and "exit" in found[-1])
    files = sorted(tmp_path.glob("wandb/wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in files}) == 1
    told = [
        {item["key"] or item["nested"]: json.loads(item["value"]) for item in record["history"]}
        for record in wandb_records(tmp_path)
        if "history" in record
    ]
    assert [(one["_step"], one["loss"]) for one in told] == LOSSES


def wandb_records(home: Path) -> list[dict[str, Any]]:
    """Kind of each record of W&B's own files; the items of those that hold numbers."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found = []
    for path in sorted(home.glob("wandb/wandb/offline-run-*/run-*.wandb")):
        for data in log_records(path.read_bytes()):
            record = records.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            items = [
                {"key": item.key, "nested": ".".join(item.nested_key), "value": item.value_json}
                for item in record.history.item
            ]
            found.append({kind: items})
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """Payloads of a LevelDB log that begins with seven bytes of W&B's own."""
    place, payload = 7, b""
    while place + _HEADER.size <= len(data):
        if _BLOCK - place % _BLOCK < _HEADER.size:
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        payload += data[place : place + length]
        place += length
        if kind in (1, 4):  # whole, or the last part
            yield payload
            payload = b""


def test_trackio_keeps_the_numbers_in_its_database(tmp_path: Path) -> None:
    forward(settings_of(tmp_path, "trackio"))
    wait_for(lambda: trackio_losses(tmp_path) == LOSSES)


def trackio_losses(home: Path) -> list[tuple[int, float]]:
    [path] = (home / "trackio").glob("ostinato*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    return [(step, json.loads(metrics)["loss"]) for step, metrics in rows]


def publish(settings: Settings, version: str) -> str:
    """A checkpoint artifact with one file; its name."""
    artifacts = open_artifacts(settings)
    directory = settings.home / "made" / version
    directory.mkdir(parents=True)
    (directory / "weights").write_text(version)
    identity = artifacts.identify("candidate", "toy", {"weights": version}, {}, ())
    return str(artifacts.publish(identity, directory, {}))


def champion(home: Path) -> str:
    """The checkpoint that MLflow calls champion."""
    found = mlflow_client(home).get_model_version_by_alias("ostinato-toy", CHAMPION)
    return found.tags[CHECKPOINT]


def settle() -> None:
    """Waits for the processes that were begun beside this one."""
    for thread in threading.enumerate():
        if thread.name == WATCHER:
            thread.join(LIMIT_SECONDS)


def test_mlflow_calls_champion_what_serves_the_line_also_after_a_roll_back(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "mlflow")
    names = [publish(settings, version) for version in ("first", "second")]
    ledger = open_ledger(settings)
    for name in names:
        ledger.promotions.promote("toy", name, None, f"{name} passed its gate", time.time())
        register_champion(settings, "toy")
        register_champion(settings, "toy")  # as after a kill
        settle()
        assert champion(tmp_path) == name
    subprocess.run(
        [*OSTINATO, "cycle", "roll-back", "--line", "toy", "--reason", "users revert more"],
        env=child_environment(settings),
        check=True,
    )
    assert champion(tmp_path) == names[0], "the command waits for it"
    versions = mlflow_client(tmp_path).search_model_versions("name = 'ostinato-toy'")
    assert sorted(version.tags[CHECKPOINT] for version in versions) == names
    assert {version.source.split("/artifacts/")[1].split("/")[0] for version in versions} == {
        "candidate"
    }


def test_an_export_is_a_version_that_stays_one_when_it_is_promoted(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "mlflow")
    name = publish(settings, "first")
    register_export(settings, name, tmp_path / "exported")
    settle()
    ledger = open_ledger(settings)
    ledger.promotions.promote("toy", name, None, "passed", time.time())
    register_champion(settings, "toy")
    settle()
    assert champion(tmp_path) == name
    [version] = mlflow_client(tmp_path).search_model_versions("name = 'ostinato-toy'")
    assert version.tags[EXPORTED] == str(tmp_path / "exported")


def test_without_a_registry_among_the_trackers_nothing_starts(tmp_path: Path) -> None:
    register_champion(settings_of(tmp_path, "trackio"), "toy")
    assert not (tmp_path / "logs").exists()
