"""A recipe as commented TOML text, and the names of runs by their recipe and seed."""

import json
import textwrap
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.errors import ConfigError
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


def run_title(flow: str, parameters: Mapping[str, Any]) -> str:
    """Name of a run of a flow with these parameters, for example `nano-seed0 reinforcement`."""
    return " ".join(filter(None, (recipe_and_seed(parameters), flow)))


def recipe_and_seed(parameters: Mapping[str, Any]) -> str:
    """Recipe and seed of a flow's parameters, for example `nano-seed0`. Empty without a recipe."""
    recipe, seed = parameters.get("recipe"), parameters.get("seed")
    if not isinstance(recipe, str):
        return ""
    try:
        loaded = load_recipe(recipe, seed=seed)
    except ConfigError:  # the run itself reports what is wrong with it
        return Path(recipe).stem
    return f"{loaded.name}-seed{loaded.seed}"
