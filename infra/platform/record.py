"""Base of the project's records and settings."""

from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from ostinato.models.record import Record

__all__ = ["Placed", "Record", "Share"]

Share = Annotated[float, Field(ge=0, le=1)]


@runtime_checkable
class Placed(Protocol):
    """A request some of whose fields say only where it is computed. Changing those keeps its results and its
    resume points.
    """

    def placement(self) -> Any:
        """The fields, as pydantic's `exclude` takes them."""
