"""Parameters of the flows as Prefect's forms show them: menus, checks, and the sections of a recipe."""

import functools
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    create_model,
    model_serializer,
)
from pydantic_core import core_schema

from ostinato.flows.recipe import Recipe, recipe_names
from ostinato.flows.recipe_text import meaning_of
from ostinato.flows.stages.checkpoints import CHAMPION, NEWEST, PROBLEM_KINDS
from ostinato.infra.platform.artifacts import ArtifactRef

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
