"""Step checkpoints of a trainer: all it needs to go on as if it had never stopped.

The folders `step-{step:08d}` and `kl-reference-{step:08d}` of a work directory. A folder appears
whole or not at all; older ones are deleted after a newer one is complete.
"""

import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ostinato.infra.platform.errors import StorageError, boundary
from ostinato.models.checkpoint import load_checkpoint, load_optimizer_state, save_checkpoint
from ostinato.models.checkpoint.adapter_files import TrainedAdapter
from ostinato.models.device import current_device
from ostinato.models.flushing import put_all_back
from ostinato.models.spec import ModelSpec
from ostinato.tasks.records import StageRecord

_STEP = re.compile(r"step-(\d{8,})$")
_REFERENCE = re.compile(r"kl-reference-(\d{8,})$")


class StepState(StageRecord):
    """Counters of a trainer."""

    step: int
    weight_version: int
    reference_step: int | None  # step whose weights are the KL reference; None: where RL began
    computed_on: str = Field(default="", description="processor and torch that took the step")


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """Content of a step checkpoint."""

    state: StepState
    weights: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    reference_weights: dict[str, Tensor] | None


class StepCheckpoints:
    """The checkpoints of one work directory."""

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        tokenizer_path: Path | None,
        keep: int | None,
        num_ranks: int,
    ) -> None:
        """`keep`: newest checkpoints that stay. None: all. `num_ranks` take the steps."""
        self.directory = directory
        self._spec = spec
        self._tokenizer_path = tokenizer_path
        self._keep = keep
        self._machine = describe_machine(num_ranks)

    def save(
        self,
        state: StepState,
        weights: Mapping[str, Tensor],
        optimizer_state: dict[str, Any],
        reference_weights: Mapping[str, Tensor] | None,
        adapter: TrainedAdapter | None = None,
    ) -> Path:
        """Writes a checkpoint, then deletes what the newest ones do not need. Returns its directory."""
        with boundary(StorageError, f"saving step {state.step} in {self.directory}"):
            if state.reference_step is not None and reference_weights is not None:
                reference = self._reference_directory(state.reference_step)
                if not reference.exists():
                    save_checkpoint(reference, self._spec, reference_weights)
            saved = save_checkpoint(
                step_directory(self.directory, state.step),
                self._spec,
                weights,
                tokenizer_path=self._tokenizer_path,
                optimizer_state=optimizer_state,
                metadata=state.model_dump() | {"computed_on": self._machine},
                adapter=adapter,
            )
            self._prune()
        return saved

    def load_newest(self) -> LoadedStep | None:
        """The newest checkpoint. None when there is none. A damaged one is a StorageError, not passed over."""
        put_all_back(self.directory)
        steps = self._numbers(_STEP)
        if not steps:
            return None
        directory = step_directory(self.directory, steps[-1])
        with boundary(
            StorageError, f"reading step checkpoint {directory}; delete it to go on from an older"
        ):
            checkpoint = load_checkpoint(directory)
            state = StepState.model_validate(checkpoint.metadata)
            optimizer_state = load_optimizer_state(directory)
            if optimizer_state is None:
                raise StorageError(
                    f"step checkpoint {directory} holds no optimiser state, wanted one"
                )
            reference = None
            if state.reference_step is not None:
                reference = load_checkpoint(self._reference_directory(state.reference_step)).weights
        return LoadedStep(state, checkpoint.weights, optimizer_state, reference)

    def _reference_directory(self, step: int) -> Path:
        return self.directory / f"kl-reference-{step:08d}"

    def _prune(self) -> None:
        if self._keep is None:
            return
        kept = self._numbers(_STEP)[-self._keep :]
        for step in self._numbers(_STEP):
            if step not in kept:
                shutil.rmtree(step_directory(self.directory, step))
        # a checkpoint uses the newest reference before it: the next refresh comes with the next step
        references = self._numbers(_REFERENCE)
        used = {max((r for r in references if r < step), default=None) for step in kept}
        for step in references:
            if step not in used:
                shutil.rmtree(self._reference_directory(step))

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        if not self.directory.is_dir():
            return []
        found = (pattern.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match.group(1)) for match in found if match)


def step_directory(directory: Path, step: int) -> Path:
    """The checkpoint of a step in a work directory."""
    return directory / f"step-{step:08d}"


def link_step(source: Path, step: int, target: Path) -> None:
    """Makes `target` a work directory whose newest checkpoint is the `step` of `source`."""
    target.mkdir(parents=True)
    saved = step_directory(source, step)
    (target / saved.name).symlink_to(saved.absolute(), target_is_directory=True)
    for reference in source.glob("kl-reference-*"):
        (target / reference.name).symlink_to(reference.absolute(), target_is_directory=True)


def describe_machine(num_ranks: int) -> str:
    """What decides the bits of a step besides its inputs: processor, instruction set, GPU, torch, ranks."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = names[0] if names else platform.machine()
    units = [processor, torch.backends.cpu.get_cpu_capability()]
    if current_device().type == "cuda":
        units.append(torch.cuda.get_device_name())
    if num_ranks > 1:
        units.append(f"{num_ranks} ranks")
    return f"{', '.join(units)}, torch {torch.__version__}"
