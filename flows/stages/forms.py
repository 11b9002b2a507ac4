"""Parameters of the flows as Prefect's forms show them: menus, checks, sections of a recipe, options of a run."""

import functools
import re
import time
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import core_schema

from ostinato.flows.recipe import Recipe, load_recipe, recipe_names
from ostinato.flows.recipe_text import meaning_of
from ostinato.flows.stages.checkpoints import CHAMPION, NEWEST, PROBLEM_KINDS
from ostinato.flows.stages.declared import STAGES
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.record import Record
from ostinato.tasks.records import Split

_UNIONS = (typing.Union, types.UnionType)
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


def _drop_defaults(schema: dict[str, Any]) -> None:
    """Removes the defaults from a schema, so that the form sends nothing for untouched fields."""
    for described in schema.get("properties", {}).values():
        described.pop("default", None)


class TableChanges(BaseModel):
    """Changed settings of one table of a recipe. Its JSON holds only these."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_drop_defaults)

    @model_serializer
    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in self if name in self.model_fields_set}


@functools.cache
def _changes_of(model: type[BaseModel]) -> type[TableChanges]:
    """The model with every field optional, for values that override a recipe."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        parts = typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)
        tables = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        if tables:
            table = _changes_of(tables[0])
            kind = table | None if type(None) in parts else table
        for rule in field.metadata:
            kind = Annotated[kind, rule]
        label = name.replace("_", " ")
        fields[name] = (kind, Field(default=None, title=label, description=meaning_of(model, name)))
    return create_model(
        f"{model.__name__}Changes",
        __base__=TableChanges,
        __cls_kwargs__={"title": _words(model.__name__)},
        **fields,
    )


def _words(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name.removesuffix("Config")).lower()


@dataclass(frozen=True)
class CachedSchema:
    """A model as a parameter, with a schema that is built once and holds no references. Prefect builds the schema of a
    form six times per deployed flow, and pydantic would walk through all 70 tables of a recipe each time.
    """

    model: Callable[[], type[BaseModel]]  # called when a value or the schema is needed

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: self.model().model_validate(value),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value, info: value.model_dump(mode=info.mode), info_arg=True
            ),
        )

    def __get_pydantic_json_schema__(
        self, core: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return dict(_schema_of(self.model()))


@functools.cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return _without_references(schema, schema.pop("$defs", {}))


def _without_references(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with each reference replaced by its definition."""
    if isinstance(schema, list):
        return [_without_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    beside = {
        name: _without_references(value, definitions)
        for name, value in schema.items()
        if name != "$ref"
    }
    if "$ref" not in schema:
        return beside
    target = definitions[schema["$ref"].rpartition("/")[2]]
    return _without_references(target, definitions) | beside


RecipeChanges = Annotated[TableChanges, CachedSchema(lambda: _changes_of(Recipe))]


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
