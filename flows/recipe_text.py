"""A recipe as commented TOML text."""

import json
import textwrap
import typing
from typing import Any

from pydantic import BaseModel

from ostinato.models.record import field_docstrings


def describe_recipe(recipe: BaseModel, prefix: str = "") -> str:
    """Every setting and table of a recipe as TOML, each under a comment with its description."""
    lines: list[str] = []
    tables: list[str] = []
    for name in type(recipe).model_fields:
        value = getattr(recipe, name)
        meaning = [f"# {line}" for line in textwrap.wrap(meaning_of(type(recipe), name), 96)]
        if isinstance(value, BaseModel):
            inner = describe_recipe(value, f"{prefix}{name}.")
            tables.append("\n".join(["", *meaning, f"[{prefix}{name}]", inner]))
            continue
        lines += meaning
        lines.append(f"# {name} is not set" if value is None else f"{name} = {_as_toml(value)}")
    return "\n".join([*lines, *tables])


def meaning_of(model: type[BaseModel], name: str) -> str:
    """The description of a setting, in one line; for a table without one, the docstring of its class."""
    field = model.model_fields[name]
    described = (field.description, field_docstrings(model).get(name))
    tables = (table.__doc__ for table in tables_in(field.annotation))
    return " ".join(next((text for text in (*described, *tables) if text), "").split())


def tables_in(annotation: object) -> list[type[BaseModel]]:
    """The record classes that an annotation names, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for part in typing.get_args(annotation) for table in tables_in(part)]


def _as_toml(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{json.dumps(str(k))} = {_as_toml(v)}" for k, v in value.items())
            + " }"
        )
    if isinstance(value, frozenset | set):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_as_toml, value)) + "]"
    return json.dumps(value)
