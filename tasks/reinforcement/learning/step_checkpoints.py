"""Step checkpoints of a trainer, from which any number of ranks resumes exactly.

Each folder of a work directory appears complete or not at all, and holds the number of its step. Older ones are deleted
after a newer one is complete. No rank holds more than its own shards and one whole tensor.

    step-{step:08d}           checkpoint of the model; written last
    optimizer-{step:08d}      every rank's parts of the optimiser's state and of adapters, in Megatron's format
    kl-reference-{step:08d}   checkpoint of the KL reference that was refreshed at that step
"""

import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from pydantic import Field

from ostinato.infra.platform.errors import StorageError, boundary
from ostinato.models.checkpoint import OpenCheckpoint, open_checkpoint, save_checkpoint
from ostinato.models.checkpoint.adapter_files import TrainedAdapter
from ostinato.models.checkpoint.resume import main_parts, write_parts, writing_group
from ostinato.models.device import current_device
from ostinato.models.flushing import put_all_back
from ostinato.models.network.build import TrainerModel
from ostinato.tasks.records import StageRecord

STEP, OPTIMIZER, REFERENCE = "step", "optimizer", "kl-reference"


class StepState(StageRecord):
    """Counters of a trainer."""

    step: int
    weight_version: int
    reference_step: int | None  # step after which the KL reference was taken; None: initial model
    has_adapters: bool = False
    has_optimizer: bool = Field(
        default=True, description="whether the optimiser has taken a step, and so has a state"
    )
    computed_on: str = Field(default="", description="processor and torch that took the step")


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """Open step checkpoint. Its tensors stay on disk until they are read."""

    state: StepState
    weights: OpenCheckpoint
    parts: Path
    reference: OpenCheckpoint | None


class StepCheckpoints:
    """The checkpoints of one work directory. All ranks call it together."""

    def __init__(
        self, directory: Path, tokenizer_path: Path | None, keep: int | None, num_ranks: int
    ) -> None:
        """`keep`: number of newest checkpoints that stay, None: all. `num_ranks`: ranks that take the steps."""
        self.directory = directory
        self._tokenizer_path = tokenizer_path
        self._keep = keep
        self._machine = describe_machine(num_ranks)
        self._is_first = dist.get_rank() == 0
        self._group = writing_group()
        # one on disk may come from steps that a kill lost, so only what was written or read here counts
        self._kept_reference: int | None = None

    def save(
        self,
        state: StepState,
        model: TrainerModel,
        parts: list[ShardedTensor],
        reference: TrainerModel | None,
        adapter: TrainedAdapter | None = None,
    ) -> Path:
        """Writes a checkpoint, then deletes folders that the kept ones do not need. Returns its directory."""
        final = step_directory(self.directory, state.step)
        with boundary(StorageError, f"saving step {state.step} in {self.directory}"):
            if parts:
                folder = self._folder(OPTIMIZER, state.step)
                write_parts(folder, main_parts(parts), {"step": state.step}, self._group)
            if reference is not None and state.reference_step not in (None, self._kept_reference):
                folder = self._folder(REFERENCE, state.reference_step)
                self.save_model(folder, reference, {"step": state.reference_step})
                self._kept_reference = state.reference_step
            metadata = state.model_dump() | {"computed_on": self._machine}
            self.save_model(final, model, metadata, adapter)
            if self._is_first and self._keep is not None:
                self._prune(self._keep)
        return final

    def save_model(
        self,
        directory: Path,
        model: TrainerModel,
        metadata: Mapping[str, Any],
        adapter: TrainedAdapter | None = None,
    ) -> None:
        """Writes a model as a checkpoint. The first rank writes one whole tensor at a time."""
        weights = model.whole_tensors()
        if not self._is_first:
            for _ in weights:
                pass
            return
        save_checkpoint(
            directory,
            model.spec,
            weights,
            tokenizer_path=self._tokenizer_path,
            metadata=metadata,
            adapter=adapter,
        )

    def find_newest(self) -> LoadedStep | None:
        """The newest checkpoint, or None without any. A damaged one is not skipped but raises StorageError."""
        put_all_back(self.directory)
        steps = self._numbers(STEP)
        if not steps:
            return None
        directory = step_directory(self.directory, steps[-1])
        with boundary(
            StorageError, f"reading step checkpoint {directory}; delete it to resume from an older"
        ):
            checkpoint = open_checkpoint(directory)
            state = StepState.model_validate(checkpoint.metadata)
            _require_step(directory, state.step, steps[-1], directory)
            parts = self._folder(OPTIMIZER, state.step)
            if state.has_optimizer or state.has_adapters:
                if not parts.is_dir():
                    raise StorageError(f"{parts} is missing, wanted it beside {directory.name}")
                held = dist_checkpointing.load_common_state_dict(str(parts)).get("step")
                _require_step(parts, held, state.step, directory)
            reference = None
            if state.reference_step is not None:
                folder = self._folder(REFERENCE, state.reference_step)
                reference = open_checkpoint(folder)
                held = reference.metadata.get("step")
                _require_step(folder, held, state.reference_step, directory)
                self._kept_reference = state.reference_step
        return LoadedStep(state, checkpoint, parts, reference)

    def _folder(self, kind: str, step: int) -> Path:
        return self.directory / f"{kind}-{step:08d}"

    def _prune(self, keep: int) -> None:
        kept = self._numbers(STEP)[-keep:]
        # a checkpoint uses the newest reference before it: a refresh takes effect in the next step
        references = self._numbers(REFERENCE)
        used = {max((r for r in references if r < step), default=None) for step in kept}
        for kind, needed in ((STEP, kept), (OPTIMIZER, kept), (REFERENCE, used)):
            for step in self._numbers(kind):
                if step not in needed:
                    shutil.rmtree(self._folder(kind, step))

    def _numbers(self, kind: str) -> list[int]:
        names = [path.name for path in self.directory.glob(f"{kind}-*")]
        found = (re.fullmatch(rf"{kind}-(\d{{8,}})", name) for name in names)
        return sorted(int(match.group(1)) for match in found if match)


def _require_step(folder: Path, held: int | None, wanted: int, checkpoint: Path) -> None:
    """`held`: number inside the folder, None without one. `checkpoint`: step checkpoint that needs the folder."""
    if held != wanted:
        raise StorageError(
            f"{folder} holds step {held}, wanted {wanted}: it was copied, renamed or written by an older version; "
            f"put the right folder there, or delete {checkpoint} to resume from an older step"
        )


def step_directory(directory: Path, step: int) -> Path:
    """The checkpoint of a step in a work directory."""
    return directory / f"{STEP}-{step:08d}"


def link_step(source: Path, step: int, target: Path) -> None:
    """Makes `target` a work directory with the `step` of `source` as its newest checkpoint."""
    target.mkdir(parents=True)
    saved = step_directory(source, step)
    parts = source / f"{OPTIMIZER}-{step:08d}"
    for folder in (saved, *source.glob(f"{REFERENCE}-*"), *([parts] if parts.is_dir() else [])):
        (target / folder.name).symlink_to(folder.absolute(), target_is_directory=True)


def describe_machine(num_ranks: int) -> str:
    """Processor, instruction set, GPU, number of ranks and torch version, which besides its inputs decide a step's bits."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = names[0] if names else platform.machine()
    units = [processor, torch.backends.cpu.get_cpu_capability()]
    if current_device().type == "cuda":
        units.append(torch.cuda.get_device_name())
    if num_ranks > 1:
        units.append(f"{num_ranks} ranks")
    return f"{', '.join(units)}, torch {torch.__version__}"
