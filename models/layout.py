"""How a model is spread over processes.

Owns `ParallelLayout`: the sizes of the parallel axes and the arithmetic over them. Enters: numbers
from a recipe. Leaves: a checked record for models/build.py. It opens no process group and moves no
tensor.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ParallelLayout(BaseModel):
    """Sizes of the axes. One process holds one coordinate of each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: int = Field(
        default=1, ge=1, description="Replicas of the model; each sees other samples."
    )
    expert: int = Field(
        default=1, ge=1, description="Ranks that share one set of experts; divides data."
    )

    @model_validator(mode="after")
    def check_axes(self) -> Self:
        """Expert parallel ranks are taken from the data parallel ones."""
        if self.data % self.expert:
            raise ValueError(f"expert={self.expert} must divide data={self.data}")
        return self

    @property
    def world_size(self) -> int:
        """Processes the layout needs."""
        return self.data
