"""Request and result of a dry run: parameters that were built, and communication of one step."""

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.training.optimizer_config import OptimizerConfig
from ostinato.tasks.planning.inputs import TrainingWork

# Largest allowed difference of built and planned parameters; both count the same tensors.
LARGEST_DIFFERENCE_RATIO = 0.005


class DryRunRequest(Record):
    """The step of a plan."""

    spec: ModelSpec
    layout: ParallelLayout
    work: TrainingWork
    optimizer: OptimizerConfig


class Exchange(Record):
    """Collectives of one kind in one phase of a step, for one rank."""

    phase: str
    operation: str
    group_ranks: int
    calls: int
    sent_bytes: float = Field(description="bytes that a rank sends by the ring algorithm")


class DryRunStage(Record):
    """One rank of a pipeline stage."""

    stage: int
    planned: int = Field(description="parameters by the plan's formula")
    built: int = Field(description="elements of the tensors that the model's modules hold")
    exchanges: tuple[Exchange, ...] = ()
    weight_bytes: int = Field(default=0, description="bytes of weights in this version's format")
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def difference_ratio(self) -> float:
        """Built over planned, less 1."""
        return self.built / self.planned - 1


class DryRunResult(Record):
    """Built parameters and counted collectives of all stages."""

    stages: tuple[DryRunStage, ...]
    microbatches: int = Field(description="forward and backward passes of a rank in the step")
    wall_seconds: float
