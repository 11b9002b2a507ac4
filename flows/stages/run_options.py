"""Options of a run, and the start of a stage under way."""

import time
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from ostinato.flows.recipe import Recipe, load_recipe
from ostinato.flows.stages.declared import STAGES
from ostinato.flows.stages.forms import CachedSchema, FieldDescription, RecipeChanges, TableChanges
from ostinato.infra.platform.artifacts import Identity
from ostinato.infra.platform.record import Record
from ostinato.tasks.records import Split

START_FILE = "stage.json"  # of the run directory of a stage under way


class StageStart(Record):
    """Identity that a stage under way began with."""

    identity: Identity
    fingerprint: str
    began_at: float
    changed_files: tuple[str, ...] = Field(default=(), description="code that changed since")


class Suite(StrEnum):
    """Held-out problems that an evaluation scores on."""

    MUTATIONS = "held-out-mutations"
    FUNCTIONS = "held-out-functions"
    BOTH = "both"

    @property
    def splits(self) -> tuple[Split, ...]:
        """Its splits. A gate judges on the first."""
        mutations, functions = (Split.HELD_OUT,), (Split.HELD_OUT_FUNCTION,)
        return {
            Suite.MUTATIONS: mutations,
            Suite.FUNCTIONS: functions,
            Suite.BOTH: mutations + functions,
        }[self]


class RunOptions(Record):
    """Options of one run beside its recipe."""

    changes: RecipeChanges = Field(
        default_factory=TableChanges,
        title="Changes to the recipe",
        description="changed settings by section; null removes a table, such as cycle.simulated_users",
    )
    overrides: tuple[str, ...] = Field(
        default=(), title="Overrides", description="section.key=value, as TOML; after the changes"
    )
    keep: tuple[str, ...] = Field(
        default=(),
        title="Stages to keep",
        description="stages whose newest artifact is used although code changed",
    )
    rebuild: tuple[str, ...] = Field(
        default=(),
        title="Stages to build again",
        description="stages that are built again although nothing changed",
    )
    rebuild_since: float | None = Field(
        default=None,
        title="Build again what is older",
        description="stages in `rebuild` only where their artifact is older (seconds since the epoch)",
    )

    def recipe_of(self, name: str, seed: int | None = None) -> Recipe:
        """The recipe with the changes and overrides of this run. ConfigError names the key that is wrong."""
        changes = self.changes.model_dump(mode="json")
        return load_recipe(name, seed=seed, overrides=self.overrides, changes=changes)

    def with_setting(self, key: str, value: float | None) -> "RunOptions":
        """These options with a setting that goes over all others. As they are when it is None."""
        if value is None:
            return self
        return self.model_copy(update={"overrides": (*self.overrides, f"{key}={value}")})

    @field_validator("keep", "rebuild")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in STAGES:
                raise ValueError(f"no stage {name!r}, wanted one of {', '.join(STAGES)}")
        return names

    @model_validator(mode="before")
    @classmethod
    def _dated(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("rebuild") and not values.get("rebuild_since"):
            return {**values, "rebuild_since": time.time()}
        return values


Options = Annotated[
    Annotated[RunOptions, CachedSchema(lambda: RunOptions)] | None,
    FieldDescription("overridden settings, stages to keep or to build again."),
]
