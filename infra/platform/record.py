"""Base of the project's records and settings."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from ostinato.models.record import Record

__all__ = ["Placed", "Record", "Share", "dotted", "finite"]

Share = Annotated[float, Field(ge=0, le=1)]


@runtime_checkable
class Placed(Protocol):
    """A request with fields that say only where it is computed. Changing those keeps its results and its
    resume points.
    """

    def placement(self) -> Any:
        """The fields, as pydantic's `exclude` takes them."""


def finite(value: Any) -> Any:
    """A value for JSON: numbers that are not finite as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def dotted(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested tables with their dotted keys."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
