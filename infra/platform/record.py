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
    """A request with placement fields, which say only where it is computed. A change of these keeps its
    results and resume points valid.
    """

    def placement(self) -> Any:
        """The placement fields, in the form of pydantic's `exclude`."""


def finite(value: Any) -> Any:
    """The value for JSON. Numbers that are not finite become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def dotted(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
