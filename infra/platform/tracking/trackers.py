"""Trackers of other projects, which can receive a stage's step metrics in addition to its metrics.jsonl.

A tracker is opened by the function that its entry point names, in a process of its own (`forwarding.py`), so that
the work goes on when it fails or hangs. accelerate's trackers make the same few calls, but import torch (4.1 s of
processor time and 243 MiB per process) and cannot resume an MLflow run.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.extras import say_missing
from ostinato.infra.platform.folders import locked
from ostinato.infra.platform.plugins import PluginGroup
from ostinato.infra.platform.record import dotted
from ostinato.infra.platform.settings import Settings

PROJECT = "ostinato"
_TAG = "ostinato.run"  # tag of an MLflow run: TrackedRun.run_id
_PARAMS_PER_CALL = 100  # MLflow's limit

TRACKERS = PluginGroup(
    "ostinato.trackers",
    "tracker",
    {
        "tensorboard": f"{__name__}:TensorBoardTracker",
        "wandb": f"{__name__}:WandbTracker",
        "mlflow": f"{__name__}:MlflowTracker",
        "trackio": f"{__name__}:TrackioTracker",
    },
)
_LIBRARIES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """One stage of one run, as a tracker names it."""

    run_id: str  # the same when the stage is resumed
    group: str  # recipe and seed, such as nano-seed0
    name: str  # kind and fingerprint of the stage's artifact
    home: Path  # of the installation; files of trackers go below it
    config: Mapping[str, Any]  # the request of the stage


class Tracker(Protocol):
    """Receiver of one run's metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receives the numbers of one step. A step may be repeated after a kill."""
        ...

    def close(self) -> None:
        """Sends the last numbers and ends the run."""
        ...


OpenTracker = Callable[[TrackedRun], Tracker]


def refuse_unknown_trackers(settings: Settings) -> None:
    """ConfigError for a tracker that nothing provides, before anything starts."""
    try:
        TRACKERS.refuse_unknown(settings.trackers)
    except ValueError as error:
        raise ConfigError(f"OSTINATO_TRACKERS: {error}") from None


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """The tracker of a run. ConfigError when its library is not installed."""
    _require_library(name)
    opened: OpenTracker = TRACKERS.load(name)
    return opened(run)


def _require_library(name: str) -> None:
    library = _LIBRARIES.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        raise ConfigError(f"tracker {name!r}: {say_missing(library, name)}")


class TensorBoardTracker:
    """Event files under HOME/tensorboard."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.home / "tensorboard" / run.group / run.name
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _RunTracker:
    """Tracker of a library that logs all numbers of a step in one call."""

    _run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(_RunTracker):
    """A run of Weights & Biases. Its variables say where the data goes: WANDB_MODE=offline keeps it here."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        folder = run.home / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=PROJECT,
            id=run.run_id,
            group=run.group,
            name=f"{run.group}/{run.name}",
            config=dict(run.config),
            dir=str(folder),
            resume="allow",
        )


class MlflowTracker:
    """A run of MLflow, at MLFLOW_TRACKING_URI or in a database below the home."""

    def __init__(self, run: TrackedRun) -> None:
        entities = importlib.import_module("mlflow.entities")
        self._metric = entities.Metric
        self._client = mlflow_client(run.home)
        experiment = self._client.get_experiment_by_name(PROJECT)
        experiment_id = (
            self._client.create_experiment(PROJECT)
            if experiment is None
            else experiment.experiment_id
        )
        known = self._client.search_runs([experiment_id], f"tags.`{_TAG}` = '{run.run_id}'")
        if known:
            self._run_id = known[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {_TAG: run.run_id, "group": run.group}
            name = f"{run.group}/{run.name}"
            created = self._client.create_run(experiment_id, tags=tags, run_name=name)
            self._run_id = created.info.run_id
            params = [entities.Param(name, str(value)) for name, value in dotted(run.config)]
            for first in range(0, len(params), _PARAMS_PER_CALL):
                self._client.log_batch(
                    self._run_id, params=params[first : first + _PARAMS_PER_CALL]
                )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        at_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, at_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def mlflow_client(home: Path) -> Any:
    """MLflow's client of MLFLOW_TRACKING_URI, or of a database below the home. ConfigError without MLflow."""
    _require_library("mlflow")
    mlflow = importlib.import_module("mlflow")
    if not mlflow.environment_variables.MLFLOW_TRACKING_URI.get():
        mlflow.set_tracking_uri(f"sqlite:///{home}/mlflow.db")
    with locked(home / "mlflow.lock"):  # creating the tables in two processes at once fails
        return mlflow.MlflowClient()


class TrackioTracker(_RunTracker):
    """A run of trackio, stored below the home unless TRACKIO_DIR or its other variables say otherwise."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = importlib.import_module("trackio").init(
            project=PROJECT,
            name=f"{run.group}-{run.name}-{run.run_id[:8]}",
            group=run.group,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
