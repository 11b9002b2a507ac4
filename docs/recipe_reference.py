"""Generator of `docs/recipe-reference.md` from the field descriptions of the recipe; `make docs` runs it."""

import sys
import types
import typing
from enum import Enum

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ostinato.flows.recipe import Recipe
from ostinato.flows.recipe_text import meaning_of, tables_in

HEAD = """# Recipe reference

Generated from the field descriptions by `make docs`; edit those, not this file. Guide: [recipes.md](recipes.md).
A key without a default has to be written.
"""


def recipe_reference() -> str:
    """The reference as Markdown: one section per table of the TOML file."""
    written: dict[type[BaseModel], str] = {}
    return HEAD + "".join(_section(Recipe, "", written))


def _section(model: type[BaseModel], path: str, written: dict[type[BaseModel], str]) -> list[str]:
    """The section of `model` at `path`, then those of the tables inside it."""
    written[model] = path
    lines = [f"\n## {f'`[{path}]`' if path else 'Top level'}\n\n"]
    lines += [f"{_one_line(model.__doc__)}\n\n"] if model.__doc__ else []
    lines += ["| key | type | default | meaning |\n", "| --- | --- | --- | --- |\n"]
    inside: list[str] = []
    for name, field in model.model_fields.items():
        place = f"{path}.{name}" if path else name
        tables = tables_in(field.annotation)
        meaning = meaning_of(model, name)
        for table in tables:
            if table in written:
                meaning = f"{meaning.rstrip('.')}; keys as `[{written[table]}]`"
            else:
                inside += _section(table, place, written)
        row = (f"`{name}`", _type_name(field.annotation), _default(field), meaning)
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |\n")
    return lines + inside


def _type_name(annotation: object) -> str:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(parts[0])
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in parts)
    if origin is not None:
        inner = ", ".join("..." if part is Ellipsis else _type_name(part) for part in parts)
        return f"{getattr(origin, '__name__', origin)} of {inner}"
    return "none" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return ""
    if isinstance(default, BaseModel):
        return "see below"
    if isinstance(default, Enum):
        default = default.value
    text = repr(default)
    if isinstance(default, tuple | list | dict) and len(text) >= 60:
        return f"{len(default)} entries"
    return f"`{text}`"


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.stdout.write(recipe_reference())
