"""Parameters of the flows as Prefect's forms show them: menus, checks, the settings that people change, and the others
as TOML.
"""

import json
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, WithJsonSchema, field_validator, model_validator
from pydantic_core import core_schema

from ostinato.flows.recipe import Recipe, load_recipe, parse_toml, recipe_names
from ostinato.flows.stages.checkpoints import CHAMPION, NEWEST, PROBLEM_KINDS
from ostinato.flows.stages.declared import STAGES
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.record import Record
from ostinato.tasks.records import Split

_REFERENCE = r"^[a-z_-]+/[\w.-]+@\d+$"
_PROBLEM_SET = rf"^({'|'.join(PROBLEM_KINDS)})/[\w.-]+@\d+$"
_CHECKPOINT = rf"^({CHAMPION}|{NEWEST})$|{_REFERENCE}"


@dataclass(frozen=True)
class FieldDescription:
    """Description of a parameter in a flow's form, unless the flow's docstring describes it."""

    text: str

    def __get_pydantic_json_schema__(
        self, core: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(core) | {"description": self.text}


RecipeName = Annotated[
    str,
    WithJsonSchema(
        {
            "anyOf": [
                {"title": "Shipped", "type": "string", "enum": recipe_names()},
                {"title": "Path", "type": "string", "pattern": "[./]"},
            ]
        }
    ),
    FieldDescription("name of a shipped recipe or path of a TOML file."),
]
Seed = Annotated[
    Annotated[int, Field(ge=0, title="Seed")] | None,
    FieldDescription("overrides the recipe's seed."),
]
CheckpointName = Annotated[str, Field(pattern=_CHECKPOINT, title="Checkpoint")]
# a flow passes the artifact itself; a person types its name
Checkpoint = Annotated[
    ArtifactRef | str,
    WithJsonSchema({"title": "Checkpoint", "type": "string", "pattern": _CHECKPOINT}),
]
ProblemSet = Annotated[
    Annotated[
        ArtifactRef | str,
        WithJsonSchema({"title": "Problem set", "type": "string", "pattern": _PROBLEM_SET}),
    ]
    | None,
    FieldDescription("a built problem set, problems/name@version; the recipe's when absent."),
]
Budget = Annotated[float, Field(gt=0, title="Seconds")] | None


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


# field of RunOptions -> setting of the recipe
_SETTINGS = {
    "base_checkpoint": "base_checkpoint",
    "learning_rate": "learning.optimizer.learning_rate",
    "group_size": "rollout.group_size",
    "max_steps": "reinforcement.max_steps",
    "serving_line": "serving.line",
    "promote": "serving.promote_evaluated",
}


class RunOptions(Record):
    """Options of one run in addition to its recipe."""

    base_checkpoint: str | None = Field(
        default=None,
        title="Base checkpoint",
        description="checkpoint to continue from, kind/name@version or a directory; the recipe's when absent",
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        title="Learning rate",
        description="learning rate of RL; the recipe's when absent",
    )
    group_size: int | None = Field(
        default=None,
        ge=2,
        title="Group size",
        description="attempts at each problem of RL; the recipe's when absent",
    )
    max_steps: int | None = Field(
        default=None,
        ge=1,
        title="Steps",
        description="steps of RL, at most; the recipe's when absent",
    )
    serving_line: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9_-]+$",
        title="Serving line",
        description="line that serves the checkpoint; the recipe's when absent",
    )
    promote: bool | None = Field(
        default=None,
        title="Promote",
        description="offers a checkpoint whose evaluation passed to the line; as in the recipe when absent",
    )
    settings: str = Field(
        default="",
        title="Further settings",
        description="any settings of the recipe, in TOML: the tables of a recipe file, or lines such as rollout.group_size = 4",
    )
    overrides: tuple[str, ...] = Field(
        default=(),
        title="Overrides",
        description="settings as `--set` takes them: section.key=value, or section.table=null; they win over those above in TOML",
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
        """The recipe with the settings of this run. ConfigError names the wrong key."""
        values = ((key, getattr(self, field)) for field, key in _SETTINGS.items())
        given = tuple(f"{key}={json.dumps(value)}" for key, value in values if value is not None)
        changes = parse_toml(self.settings)
        return load_recipe(name, seed=seed, overrides=(*self.overrides, *given), changes=changes)

    def with_setting(self, key: str, value: float | None) -> "RunOptions":
        """These options with a setting that overrides all others. Unchanged when the value is None."""
        if value is None:
            return self
        return self.model_copy(update={"overrides": (*self.overrides, f"{key}={value}")})

    @field_validator("settings")
    @classmethod
    def _is_toml(cls, text: str) -> str:
        try:
            parse_toml(text)
        except ValueError as error:
            raise ValueError(f"not TOML: {error}") from None
        return text

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
    RunOptions | None, FieldDescription("changed settings, stages to keep or to rebuild.")
]
