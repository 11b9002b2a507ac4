"""Model registries of other projects: champions and exported checkpoints become model versions there.

As with trackers, a separate process (`python -m ostinato.infra.platform.tracking.registries`) reads the ledger and
updates the registry, so that the work neither waits nor fails.
"""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ostinato.infra.platform.artifacts import open_artifacts
from ostinato.infra.platform.folders import locked
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.plugins import PluginGroup
from ostinato.infra.platform.settings import Settings, load_settings
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.infra.platform.tracking.forwarding import run_in_process
from ostinato.infra.platform.tracking.trackers import PROJECT, mlflow_client

REGISTRIES = PluginGroup(
    "ostinato.model_registries", "model registry", {"mlflow": f"{__name__}:MlflowRegistry"}
)
CHAMPION = "champion"
CHECKPOINT, FINGERPRINT, EXPORTED = (
    f"{PROJECT}.checkpoint",
    f"{PROJECT}.fingerprint",
    f"{PROJECT}.exported",
)
WATCHER = "model registries"  # name of the thread that waits for the process
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class RegisteredCheckpoint:
    """A checkpoint, as a registry names it."""

    model: str
    checkpoint: str  # kind/name@version here; a model has one version per checkpoint
    source: str  # where its files lie
    tags: dict[str, str]
    description: str = ""


class ModelRegistry(Protocol):
    """Registry of the models of a home. Registering again changes only tags."""

    def register(self, checkpoint: RegisteredCheckpoint, alias: str | None) -> None:
        """Makes the checkpoint a version of its model, to which alone the alias then points."""
        ...


class MlflowRegistry:
    """MLflow's registry, at MLFLOW_TRACKING_URI or in a database below the home."""

    def __init__(self, home: Path) -> None:
        self._client = mlflow_client(home)

    def register(self, checkpoint: RegisteredCheckpoint, alias: str | None) -> None:
        if not self._client.search_registered_models(f"name = '{checkpoint.model}'"):
            self._client.create_registered_model(checkpoint.model)
        found = self._version(checkpoint)
        if alias is not None:
            self._client.set_registered_model_alias(checkpoint.model, alias, found.version)

    def _version(self, checkpoint: RegisteredCheckpoint) -> Any:
        for known in self._client.search_model_versions(f"name = '{checkpoint.model}'"):
            if known.tags.get(CHECKPOINT) == checkpoint.checkpoint:
                for name, value in checkpoint.tags.items():
                    self._client.set_model_version_tag(checkpoint.model, known.version, name, value)
                return known
        return self._client.create_model_version(
            checkpoint.model,
            source=checkpoint.source,
            tags={CHECKPOINT: checkpoint.checkpoint, **checkpoint.tags},
            description=checkpoint.description,
        )


def register_champion(settings: Settings, line: str) -> None:
    """Registers the checkpoint that serves a line now in each registry of `settings.trackers`."""
    _start(settings, "champion", line)


def register_export(settings: Settings, checkpoint: str, directory: Path) -> None:
    """Registers the directory of an exported checkpoint in each registry of `settings.trackers`."""
    _start(settings, "export", checkpoint, str(directory.resolve()))


def _start(settings: Settings, *arguments: str) -> None:
    if set(settings.trackers) & set(REGISTRIES.names):
        run_in_process(WATCHER, (__name__, *arguments), settings, _TIMEOUT_SECONDS)


def main(kind: str, name: str, directory: str = "") -> None:
    """Registers the champion of the line `name`, or the export of the checkpoint `name`, in the registries."""
    configure_logging()
    settings = load_settings()
    # the last process to run reads the newest champion
    with locked(settings.home / "registries.lock"):
        found = _find_checkpoint(settings, kind, name, directory)
        if found is None:
            return
        for tracker in settings.trackers:
            if tracker in REGISTRIES.names:
                registry: ModelRegistry = REGISTRIES.load(tracker)(settings.home)
                registry.register(found, CHAMPION if kind == "champion" else None)


def _find_checkpoint(
    settings: Settings, kind: str, name: str, directory: str
) -> RegisteredCheckpoint | None:
    """The checkpoint to register. None: the line has no champion."""
    with contextlib.closing(open_ledger(settings)) as ledger:
        artifacts = open_artifacts(settings, ledger)
        if kind == "export":
            ref = artifacts.get(name)
            tags = {EXPORTED: directory, FINGERPRINT: ref.fingerprint}
            model = f"{PROJECT}-{ref.name}"
            return RegisteredCheckpoint(model, str(ref), f"file://{directory}", tags)
        pointer = ledger.promotions.current(name)
        if pointer is None:
            return None
        ref = artifacts.get(pointer.checkpoint_id)
    return RegisteredCheckpoint(
        model=f"{PROJECT}-{name}",
        checkpoint=str(ref),
        source=f"{settings.object_store_url.rstrip('/')}/{ref.object_prefix}",
        tags={FINGERPRINT: ref.fingerprint},
        description=pointer.reason,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
