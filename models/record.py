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
    """Frozen values. Unknown fields are errors, and so are non-finite numbers, which JSON lacks.

    A long description is a string below its field. It is read only when shown, and validators are
    built on first use: both at import would double the start time of a process.
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
    """The string below each field in the source of a model and its base classes."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except (OSError, TypeError):  # created at run time, such as a parametrised generic class
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
