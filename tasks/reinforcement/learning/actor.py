"""Client of an RL run's trainer. All ranks run each call: `step`, `start_publish`, `save`.

A lost rank raises ClusterError in this call and in every later one; the run then restarts from the newest checkpoint.
The caller keeps the journal. It marks groups as trained at step `status().step + 1` before it calls `step`, so that after
a kill `reopen_after(run, status().step)` returns exactly the groups that the restored weights have not seen.

The run's driver imports this module. Importing Megatron takes 4 s, so only the ranks import the trainer.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from ostinato.infra.platform.cluster.placement import Placement, rank_options, shared_core_options
from ostinato.infra.platform.cluster.rank_group import COLLECTIVE_SECONDS, RankGroup
from ostinato.infra.platform.objects import ObjectStore
from ostinato.tasks.records import Sample, StageRecord
from ostinato.tasks.reinforcement.learning.config import TrainerRequest
from ostinato.tasks.reinforcement.learning.report import StepReport

if TYPE_CHECKING:
    from ostinato.tasks.reinforcement.learning.trainer import RLTrainer

STEP_SECONDS = 3600.0


class Publication(StageRecord):
    """A version on the weight chain."""

    version: int
    kind: str
    density_ratio: float
    stored_bytes: int
    published_at: float


class TrainerStatus(StageRecord):
    """Step and weight version of a trainer."""

    step: int = Field(description="optimiser steps that led to its weights")
    weight_version: int = Field(description="version of its weights on the chain")
    resumed_version: int = Field(
        description="version of the weights that it resumed from, when they were saved; 0: the initial model"
    )

    def renumber(self, version: int) -> int:
        """A version of an earlier process, as many behind `weight_version` as it was behind `resumed_version`.

        A trainer that is killed between publishing a step and saving it resumes the weights before that step, and
        publishes them under a new number. No group is older for that.
        """
        lost = self.weight_version - self.resumed_version
        return version + lost if version <= self.resumed_version else version


class SavedStep(StageRecord):
    """Step checkpoint of a trainer, and the committed version on the chain with the same weights."""

    checkpoint_directory: str = Field(description="checkpoint of the model")
    publication: Publication


class TrainerGroup:
    """The ranks of a trainer. Used by one thread at a time."""

    def __init__(
        self,
        request: TrainerRequest,
        objects: ObjectStore,
        placement: Placement | None = None,
        collective_seconds: float = COLLECTIVE_SECONDS,
    ) -> None:
        """Starts the ranks in their `placement`. They resume from the newest step checkpoint and publish its weights.
        None: a single rank, which shares its core with the other actors.
        """
        ranks = range(request.config.world_size)
        self._ranks = RankGroup(
            request.chain_id,
            functools.partial(_open_rank, request, objects),
            Path(request.work_directory),
            request.config.parallel_layout,
            request.device,
            [shared_core_options()]
            if placement is None
            else [rank_options(placement, rank) for rank in ranks],
            collective_seconds,
        )

    def status(self) -> TrainerStatus:
        """Step and version of the trainer. After the start these are the ones it resumed from."""
        return self._ranks.call(_status, limit_seconds=STEP_SECONDS)

    def step(self, samples: Sequence[Sample]) -> StepReport:
        """Takes one optimiser step from the samples."""
        return self._ranks.call(_step, samples, limit_seconds=STEP_SECONDS)

    def start_publish(self) -> int:
        """Starts publishing the current weights in the background. Returns their version."""
        return self._ranks.call(_start_publish, limit_seconds=STEP_SECONDS)

    def save(self) -> SavedStep:
        """Writes a step checkpoint, then waits until the version of `start_publish` is committed."""
        return self._ranks.call(_save, limit_seconds=STEP_SECONDS)

    def close(self) -> None:
        """Ends the ranks."""
        self._ranks.close()


def _open_rank(request: TrainerRequest, objects: ObjectStore, _: int) -> "RLTrainer":
    torch.set_num_threads(1)
    from ostinato.tasks.reinforcement.learning.trainer import RLTrainer  # noqa: PLC0415 - see the module docstring

    return RLTrainer(request, objects)


def _status(trainer: "RLTrainer") -> TrainerStatus:
    return TrainerStatus(
        step=trainer.steps_taken,
        weight_version=trainer.weight_version,
        resumed_version=trainer.resumed_version,
    )


def _step(trainer: "RLTrainer", samples: Sequence[Sample]) -> StepReport:
    return trainer.step(samples)


def _start_publish(trainer: "RLTrainer") -> int:
    return trainer.start_publish()


def _save(trainer: "RLTrainer") -> SavedStep:
    directory = trainer.save()
    publication = Publication.model_validate(trainer.finish_publish(), from_attributes=True)
    return SavedStep(checkpoint_directory=str(directory), publication=publication)
