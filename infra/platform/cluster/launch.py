"""Stages under torchrun: each of its processes is a rank of every training stage.

Rank 0 runs the command. The other ranks wait in torchrun's store for the directory of each stage, read the request
there and take part, so all machines need the home under the same path.
"""

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from ostinato.infra.platform.cluster.child_main import answer_request
from ostinato.infra.platform.cluster.workspace import (
    REQUEST,
    RequestEnvelope,
    Workspace,
    read_record,
)
from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.settings import Launch, load_settings
from ostinato.infra.platform.telemetry import configure_logging, fields

_STORE_TIMEOUT = timedelta(seconds=60)
_END = ""
_COUNT = "stages"

_logger = logging.getLogger(__name__)
_followed = 0  # number of the stage that this process takes part in; stays 0 in rank 0


def run_launched(launch: Launch, command: Callable[[], object]) -> None:
    """Runs the command in rank 0. The other ranks take part in its stages until it ends."""
    if launch.rank > 0:
        _follow(launch)
        return
    try:
        command()
    finally:
        store = _open_store(launch)
        store.set(_key(store.add(_COUNT, 1)), _END)


def join_stage(launch: Launch, directory: Path, world_size: int) -> Store:
    """The store in which the ranks of a stage meet. Rank 0 announces the directory to the others.
    ConfigError when torchrun started another number of processes than `world_size`.
    """
    if launch.world_size != world_size:
        raise ConfigError(
            f"torchrun started {launch.world_size} processes and world_size of {directory.name} is "
            f"{world_size}, wanted equal numbers; set world_size in the stage's section of the recipe, as in "
            f"--set pretraining.world_size={launch.world_size}"
        )
    store, stage = _open_store(launch), _followed
    if launch.rank == 0:
        stage = store.add(_COUNT, 1)
        store.set(_key(stage), str(directory))
    return PrefixStore(f"{_key(stage)}/ranks", store)


def _follow(launch: Launch) -> None:
    global _followed
    configure_logging()
    store = _open_store(launch)
    while True:
        _followed += 1
        _logger.info("waits for a stage %s", fields(rank=launch.rank, stage=_followed))
        announced = _wait(store, _key(_followed)).decode()
        if announced == _END:
            return
        try:
            _take_part(Path(announced))
        except Exception:  # rank 0 fails too, and its flow decides what comes next
            _logger.exception("a stage failed %s", fields(rank=launch.rank, stage=_followed))


def _take_part(directory: Path) -> None:
    envelope = read_record(directory / REQUEST, RequestEnvelope)
    if envelope is None:
        raise StorageError(
            f"{directory / REQUEST} is missing, wanted the home on a file system that all machines see"
        )
    answer_request(envelope, Workspace.open(directory, load_settings()))


def _open_store(launch: Launch) -> Store:
    store = TCPStore(
        launch.master_addr, launch.master_port, is_master=False, timeout=_STORE_TIMEOUT
    )
    return PrefixStore(f"ostinato/{launch.torchelastic_restart_count}", store)


def _wait(store: Store, key: str) -> bytes:
    while True:
        try:
            store.wait([key], _STORE_TIMEOUT)
            return store.get(key)
        except DistStoreError:  # not set yet
            continue


def _key(stage: int) -> str:
    return f"stage-{stage}"
