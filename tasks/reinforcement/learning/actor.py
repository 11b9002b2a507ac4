"""The trainer as a Ray actor: one thread of arithmetic, in this process and in each further rank's.

While a version travels to the object store the step checkpoint is written; neither waits for the
other. A lost rank is a ClusterError now and at every later call: the run starts again from the
newest checkpoint. The journal is the caller's: it marks groups as trained at step `status().step +
1` before `advance`, so that after a kill `reopen_after(run, status().step)` gives back exactly the
groups that the restored weights have not seen.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import ray
import torch
from pydantic import Field

from ostinato.infra.platform.cluster.actors import wait_for
from ostinato.infra.platform.cluster.placement import (
    Room,
    rank_options,
    release_ranks,
    reserve_ranks,
)
from ostinato.infra.platform.cluster.ray_start import start_ray
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.records import Sample, StageRecord
from ostinato.tasks.reinforcement.learning.config import TrainerRequest
from ostinato.tasks.reinforcement.learning.report import StepReport

Given = ParamSpec("Given")
Answer = TypeVar("Answer")

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

    step: int = Field(description="optimiser steps its weights have seen")
    weight_version: int = Field(description="version of its weights on the chain")
    chain_id: str


class TrainedStep(StageRecord):
    """One step with the version it led to, committed on the chain."""

    report: StepReport
    publication: Publication
    checkpoint_directory: str | None = Field(description="None: not saved at this step")


class TrainerActor:
    """Trainer behind a Ray actor, or called directly."""

    def __init__(
        self, request: TrainerRequest, objects: ObjectStore, room: Room | None = None
    ) -> None:
        """Takes up the newest step checkpoint and puts its weights on the chain."""
        torch.set_num_threads(1)
        self._chain_id = request.chain_id
        # The run's own process reads this module too, and importing Megatron takes 4 s.
        from ostinato.tasks.reinforcement.learning.trainer import RLTrainer  # noqa: PLC0415

        self._trainer = RLTrainer(request, objects, room)

    def status(self) -> TrainerStatus:
        """Step and version of the trainer. Right after the start: those it resumed from."""
        return TrainerStatus(
            step=self._trainer.step,
            weight_version=self._trainer.weight_version,
            chain_id=self._chain_id,
        )

    def save(self) -> str:
        """Writes a step checkpoint. Returns its directory, a whole checkpoint of the model."""
        return str(self._trainer.save())

    def advance(self, samples: Sequence[Sample], *, save: bool = True) -> TrainedStep:
        """Takes a step, then publishes and saves at once. Returns when both are done."""
        report = self._trainer.train_step(samples)
        self._trainer.start_publish()
        directory: Path | None = self._trainer.save() if save else None
        return TrainedStep(
            report=report,
            publication=Publication.model_validate(
                self._trainer.finish_publish(), from_attributes=True
            ),
            checkpoint_directory=None if directory is None else str(directory),
        )

    def close(self) -> None:
        """Waits for what is under way and ends the other ranks."""
        self._trainer.close()


def train_in_room(
    work: Callable[Concatenate[TrainerRequest, Room | None, Given], Answer],
    settings: Settings,
    request: TrainerRequest,
    *arguments: Given.args,
    **options: Given.kwargs,
) -> Answer:
    """`work` with a trainer of its own: here, or with several ranks on Ray, where the first has its room."""
    num_ranks = request.config.world_size
    if num_ranks == 1:
        return work(request, None, *arguments, **options)
    start_ray(settings.cpu_limit, settings.object_store_memory_bytes, settings.ray_address)
    room = reserve_ranks(num_ranks, request.device)
    try:
        task = ray.remote(work).options(max_retries=0, **rank_options(room, 0))
        answer = task.remote(request, room, *arguments, **options)
        return wait_for(answer, f"the trainer of {request.chain_id}", STEP_SECONDS)
    finally:
        release_ranks(room)
