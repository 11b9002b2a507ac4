"""A dry run's request and answer: what was built of a plan, and what one step's ranks tell each other."""

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.training.optimizer_config import OptimizerConfig
from ostinato.tasks.planning.workload import TrainingWork

# Built parameters may differ from planned ones by so much; both count the same tensors.
LARGEST_DIFFERENCE_RATIO = 0.005


class DryRunRequest(Record):
    """The step of a plan."""

    spec: ModelSpec
    layout: ParallelLayout
    work: TrainingWork
    optimizer: OptimizerConfig


class BuiltStage(Record):
    """Parameters of one rank of a pipeline stage."""

    stage: int
    planned: int = Field(description="by the plan's formula")
    built: int = Field(description="elements of the tensors that the model's modules hold")

    @property
    def difference_ratio(self) -> float:
        """Built over planned, less 1."""
        return self.built / self.planned - 1


class Exchange(Record):
    """Collectives of one kind in one phase of a step, as one rank takes part in them."""

    phase: str
    operation: str
    group_ranks: int
    calls: int
    sent_bytes: float = Field(description="by the ring algorithm")


class DryRunResult(Record):
    """Parameters that were built, collectives that were walked."""

    stages: tuple[BuiltStage, ...]
    microbatches: int = Field(description="forward and backward passes of the rank in the step")
    exchanges: tuple[Exchange, ...]
    weight_bytes: int = Field(description="of the rank, as this version holds them")
    gradient_bytes: int
    optimizer_bytes: int
    not_walked: tuple[str, ...] = Field(description="parts of the layout that training has not")
    wall_seconds: float
