"""How a model is spread over processes.

`ParallelLayout`: the sizes of the parallel axes. It opens no process group and moves no tensor.
Data parallelism is the only axis so far: every process holds the whole model.
"""

from pydantic import BaseModel, ConfigDict, Field


class ParallelLayout(BaseModel):
    """Sizes of the axes. One process holds one coordinate of each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: int = Field(default=1, ge=1, description="replicas of the model; each sees other samples")

    @property
    def world_size(self) -> int:
        """Processes the layout needs."""
        return self.data
