"""Options of a run, and the record of a stage's start."""

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

START_FILE = "stage.json"  # in the run directory of an unfinished stage


class StageStart(Record):
    """The identity that an unfinished stage was started with."""

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
        """The splits of the suite. A gate judges on the first."""
        mutations, functions = (Split.HELD_OUT,), (Split.HELD_OUT_FUNCTION,)
        return {
            Suite.MUTATIONS: mutations,
            Suite.FUNCTIONS: functions,
            Suite.BOTH: mutations + functions,
        }[self]


class RunOptions(Record):
    """Options of one run in addition to its recipe."""

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
        description="stages that use their newest artifact although code changed",
    )
    rebuild: tuple[str, ...] = Field(
        default=(),
        title="Stages to rebuild",
        description="stages to build again although nothing changed",
    )
    rebuild_since: float | None = Field(
        default=None,
        title="Rebuild if older than",
        description="limits `rebuild` to stages with an artifact older than this (seconds since the epoch)",
    )

    def recipe_of(self, name: str, seed: int | None = None) -> Recipe:
        """The recipe with the changes and overrides of this run. ConfigError names the wrong key."""
        changes = self.changes.model_dump(mode="json")
        return load_recipe(name, seed=seed, overrides=self.overrides, changes=changes)

    def with_setting(self, key: str, value: float | None) -> "RunOptions":
        """These options with a setting that overrides all others. Unchanged when the value is None."""
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
    FieldDescription("overridden settings, stages to keep or to rebuild."),
]
