"""Order of the stages that make the chain's checkpoints, with the stages that installed packages add."""

from typing import Self

from pydantic import Field, JsonValue, field_validator, model_validator

from ostinato.infra.platform.plugins import PluginGroup
from ostinato.infra.platform.record import Record

SHIPPED = ("pretraining", "mtp", "reinforcement")
# A shipped stage is the entry of a child; a stage of a package is a function of type OwnStage (own_stage.py).
STAGES = PluginGroup(
    "ostinato.stages",
    "stage",
    {
        "pretraining": "ostinato.tasks.pretraining.run:main",
        "mtp": "ostinato.tasks.pretraining.mtp.run:main",
        "reinforcement": "ostinato.tasks.reinforcement.run:main",
    },
)


class PipelineConfig(Record):
    """Stages that make checkpoints."""

    stages: tuple[str, ...] = SHIPPED
    """stages in their order, each applied to the checkpoint of the one before. pretraining, mtp and
    reinforcement are shipped and keep this order; the entry point group ostinato.stages adds others, which run
    between or after them"""
    settings: dict[str, dict[str, JsonValue]] = Field(default={})
    """settings of added stages, by the stage's name"""

    @field_validator("stages")
    @classmethod
    def _known_stages(cls, stages: tuple[str, ...]) -> tuple[str, ...]:
        STAGES.refuse_unknown(stages)
        shipped = tuple(name for name in stages if name in SHIPPED)
        if shipped != SHIPPED or stages[0] != SHIPPED[0] or len(set(stages)) < len(stages):
            raise ValueError(
                f"stages is {list(stages)}, wanted pretraining first, then mtp, then reinforcement, and each "
                "stage once; pretraining.phases = [] and mtp.depth = 0 skip those two"
            )
        return stages

    @model_validator(mode="after")
    def _settings_of_named_stages(self) -> Self:
        if unknown := sorted(self.settings.keys() - {*self.stages}):
            raise ValueError(
                f"settings names {unknown[0]!r}, wanted one of the added stages of {list(self.stages)}"
            )
        if shipped := sorted(self.settings.keys() & {*SHIPPED}):
            raise ValueError(
                f"settings names the shipped stage {shipped[0]!r}, wanted an added one: the recipe's section "
                f"[{shipped[0]}] holds its settings"
            )
        return self

    def added_after(self, stage: str) -> tuple[str, ...]:
        """Added stages between a shipped stage and the next shipped one, in their order."""
        later = self.stages[self.stages.index(stage) + 1 :]
        end = next((index for index, name in enumerate(later) if name in SHIPPED), len(later))
        return later[:end]


class OwnStageRequest(Record):
    """Request for the run of a stage that an installed package adds."""

    stage_name: str = Field(description="name of the entry point")
    settings: dict[str, JsonValue] = Field(description="the recipe's settings for the stage")
    seed: int
    checkpoint_directory: str
    problems_directory: str


class OwnStageResult(Record):
    """Checkpoint of an added stage."""

    checkpoint_directory: str
    stage_name: str = Field(description="name of the entry point")
    changed_ratio: float = Field(description="share of the weights' values that the stage changed")
