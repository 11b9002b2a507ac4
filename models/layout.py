"""Parallel layouts: the part of a model and of a batch that each rank holds."""

from typing import NamedTuple, Self

from pydantic import Field

from ostinato.models.record import Record
from ostinato.models.spec import ModelSpec


class RankPlace(NamedTuple):
    """Coordinates of one rank, each counted from 0."""

    rank: int
    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


class ParallelLayout(Record):
    """Degrees of parallelism. Ranks are numbered in Megatron's order: tensor fastest, then context,
    data and pipeline; for experts expert-tensor fastest, then expert, expert-data and pipeline.
    """

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    interleave: int = Field(default=1, ge=1, description="model chunks per pipeline rank")
    context: int = Field(default=1, ge=1)
    data: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    expert_tensor: int = Field(default=1, ge=1)

    @classmethod
    def over(cls, world_size: int, **degrees: int) -> Self:
        """Layout of `world_size` ranks. The ranks left by the other degrees are data-parallel."""
        one = cls(**degrees)
        fixed = one.tensor * one.pipeline * one.context
        if world_size % fixed:
            raise ValueError(
                f"tensor x pipeline x context = {one.tensor} x {one.pipeline} x {one.context} = "
                f"{fixed}, wanted a divisor of the {world_size} ranks"
            )
        layout = one.model_copy(update={"data": world_size // fixed})
        share = one.expert * one.expert_tensor
        if (world_size // one.pipeline) % share:
            raise ValueError(
                f"expert x expert_tensor = {one.expert} x {one.expert_tensor} = {share}, wanted a "
                f"divisor of the {world_size // one.pipeline} ranks of a pipeline stage"
            )
        return layout

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_data(self) -> int:
        """Copies of an expert."""
        return self.world_size // (self.pipeline * self.expert * self.expert_tensor)

    def check(self, spec: ModelSpec) -> None:
        """Raises ValueError for a size of the model that the layout does not divide."""
        wanted = {
            "num_attention_heads": (spec.num_attention_heads, "tensor", self.tensor),
            "num_query_groups": (spec.num_query_groups, "tensor", self.tensor),
            "vocab_size": (spec.vocab_size, "tensor", self.tensor),
            "dense_hidden_size": (spec.dense_hidden_size, "tensor", self.tensor),
            "num_experts": (spec.num_experts, "expert", self.expert),
            "expert_hidden_size": (spec.expert_hidden_size, "expert_tensor", self.expert_tensor),
            "shared_expert_hidden_size": (spec.shared_expert_hidden_size, "tensor", self.tensor),
        }
        for name, (size, axis, degree) in wanted.items():
            if size % degree:
                raise ValueError(f"{axis}={degree} does not divide {name}={size}")
        if spec.num_experts == 0 and self.expert * self.expert_tensor > 1:
            raise ValueError(
                f"expert={self.expert}, expert_tensor={self.expert_tensor}, wanted 1 and 1: the "
                "model has no experts"
            )
        chunks = self.pipeline * self.interleave
        if self.interleave > 1 and self.pipeline == 1:
            raise ValueError(f"interleave={self.interleave} with pipeline=1, wanted 1")
        if spec.num_layers % chunks:
            raise ValueError(
                f"pipeline x interleave = {self.pipeline} x {self.interleave} = {chunks} does not "
                f"divide num_layers={spec.num_layers}"
            )

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds only a part of the model."""
        return self.world_size > self.data or self.expert * self.expert_tensor > 1

    def leaders(self) -> list[int]:
        """Per data-parallel index, the first rank of the last stage, which has the losses."""
        last = (0, 0, self.pipeline - 1)
        return [
            place.rank
            for place in self.places()
            if (place.tensor, place.context, place.pipeline) == last
        ]

    def places(self) -> tuple[RankPlace, ...]:
        """Coordinates of every rank."""
        return tuple(self._place(rank) for rank in range(self.world_size))

    def _place(self, rank: int) -> RankPlace:
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        rest, expert_tensor = divmod(rank, self.expert_tensor)
        rest, expert = divmod(rest, self.expert)
        return RankPlace(
            rank, tensor, context, data, pipeline, expert_tensor, expert, rest % self.expert_data
        )
