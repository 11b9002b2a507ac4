"""Points from which an interrupted training run continues, in Megatron's format `torch_dist`.

Each rank writes its own parts while the next steps run, and reads back the parts that its layout
needs, so no rank holds a whole tensor. A point is a directory that gets its final name once all
parts are written. All ranks must see the directory.

    resume-NAME/   __RANK_0.distcp, .metadata   parts, and their locations
                   common.pt                    state that all ranks share
                   metadata.json                the format, for Megatron
"""

import dataclasses
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ostinato.models.checkpoint.full_disk import naming_full_disk
from ostinato.models.device import CPU
from ostinato.models.flushing import make_parents, place_folder

PREFIX = "resume-"
FAILED_RUN_SECONDS = 30.0


class ResumePoints:
    """Newest resume point of a run and the one being written. All ranks call it together."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._group = writing_group()  # used by the writing threads only
        self._is_checked = self._group is None
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Waits for the point that is being written. After a failure it waits at most
        `FAILED_RUN_SECONDS`, since other ranks may never finish their parts.
        """
        if kind is None:
            self.finish()
        elif self._writer is not None:
            self._writer.join(FAILED_RUN_SECONDS)

    def save(self, name: str, parts: Iterable[ShardedTensor], common: dict[str, Any]) -> None:
        """Waits for the last point, copies the parts to the CPU and begins to write them."""
        self.finish()
        mine: list[Any] = list(parts)  # Megatron's types name neither lists nor whole parts
        if not self._is_checked:  # the parts of all ranks must cover each tensor exactly once
            validate_sharding_integrity(determine_global_metadata({"parts": mine})[1])
            self._is_checked = True
        staged = {
            key: [dataclasses.replace(part, data=part.data.to(CPU, copy=True)) for part in own]
            for key, own in main_parts(mine).items()
        }
        self._writer = threading.Thread(
            target=self._write, args=(name, staged, common), daemon=True, name="resume-point"
        )
        self._writer.start()

    def finish(self) -> None:
        """Waits for the point that is being written. Raises its error if writing failed."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def newest(self, identity: str) -> tuple[Path, dict[str, Any]] | None:
        """Directory and `common` of the newest point whose common["identity"] is `identity`."""
        for path in sorted(self.directory.glob(f"{PREFIX}*"), reverse=True):
            common = dist_checkpointing.load_common_state_dict(str(path))
            if common["identity"] == identity:
                return path, common
        return None

    def _write(self, name: str, staged: dict[str, list[Any]], common: dict[str, Any]) -> None:
        final = self.directory / f"{PREFIX}{name}"
        is_first = dist.get_rank() == 0
        try:
            write_parts(final, staged, common, self._group)
        except Exception as error:  # noqa: BLE001  # crosses from this thread to the run
            self._failure = error
        if is_first:
            for path in self.directory.glob(f".{PREFIX}*"):
                shutil.rmtree(path, ignore_errors=True)
            for path in self.directory.glob(f"{PREFIX}*"):
                if path != final and final.exists():
                    shutil.rmtree(path, ignore_errors=True)


def writing_group() -> Any:
    """Process group of the writing threads. None for a single rank."""
    return None if dist.get_world_size() == 1 else dist.new_group(backend="gloo")


def main_parts(parts: Iterable[Any]) -> dict[str, list[Any]]:
    """Parts that this rank writes, by name."""
    found: dict[str, list[Any]] = {}
    for part in parts:
        if is_main_replica(part.replica_id):
            detached = dataclasses.replace(part, data=part.data.detach())
            found.setdefault(part.key, []).append(detached)
    return found


def write_parts(
    final: Path, parts: dict[str, list[Any]], common: dict[str, Any], group: Any
) -> None:
    """Writes each rank's parts, and the shared state once, into a folder that appears when
    complete. All ranks call it together.
    """
    temporary = final.with_name(f".{final.name}")
    is_first = dist.get_rank() == 0
    try:
        with naming_full_disk(final):  # measures free space before the partial folder is deleted
            _prepare(temporary, common if is_first else None, group)
            _write_shards(temporary, parts, group)
            if is_first:
                save_config(CheckpointingConfig("torch_dist"), str(temporary))
                place_folder(temporary, final)
    finally:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)


def _write_shards(folder: Path, parts: dict[str, list[Any]], group: Any) -> None:
    try:
        save(
            mcore_to_pyt_state_dict(parts),
            storage_writer=FileSystemWriter(folder),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:  # torch derives it from BaseException
        causes = {rank: str(cause[0]) for rank, cause in error.failures.items()}
        raise RuntimeError(f"parts were not written, causes by rank: {causes}") from None


def _prepare(folder: Path, common: dict[str, Any] | None, group: Any) -> None:
    """Makes the folder on rank 0. The other ranks wait, since their writers would make it too."""
    is_ready = torch.ones(1)
    failure: Exception | None = None
    if common is not None:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            make_parents(folder)
            folder.mkdir()
            torch.save(common, folder / COMMON_STATE_FNAME)
        except Exception as error:  # noqa: BLE001  # raised below, once the other ranks know
            failure, is_ready = error, torch.zeros(1)
    if group is not None:
        dist.broadcast(is_ready, src=0, group=group)
    if failure is not None:
        raise failure
    if not is_ready:
        raise RuntimeError(f"rank 0 could not make {folder}; see its log for the cause")


@torch.no_grad()
def load_parts(point: Path, parts: Iterable[ShardedTensor]) -> None:
    """Fills the parts' tensors from a point. All ranks call it together."""
    wanted: dict[str, Any] = {str(number): part for number, part in enumerate(parts)}
    targets = {number: part.data.detach() for number, part in wanted.items()}
    try:
        loaded: Any = dist_checkpointing.load(wanted, str(point))
    except CheckpointException as error:  # torch derives it from BaseException
        causes = {rank: str(cause[0]) for rank, cause in error.failures.items()}
        raise ValueError(f"{point} lacks the wanted parts, causes by rank: {causes}") from None
    for number, target in targets.items():
        target.copy_(loaded[number])
