"""Base of the project's records and settings, free of tensors so that recipes can hold them."""

import ast
import functools
import inspect
import itertools
import textwrap
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic_core import CoreSchema


class Record(BaseModel):
    """Frozen values. An unknown field is an error, and so is a number that is not finite: JSON has none.

    The description of a field that does not fit beside it stands below it. It is read when it is shown and validators
    are built when they are first used, since both together would double the time that a process needs to start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        for name, described in schema.get("properties", {}).items():
            if text := field_docstrings(cls).get(name):
                described.setdefault("description", text)
        return schema


@functools.cache
def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field in the source of a model and of those that it extends."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except (OSError, TypeError):  # made at run time, as a generic class with its parameter is
            continue
        body = ast.parse(source).body[0]  # noqa: TID251 - layers below know no lock; inspect parses too
        assert isinstance(body, ast.ClassDef)
        for field, below in itertools.pairwise(body.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = inspect.cleandoc(text)
    return found
