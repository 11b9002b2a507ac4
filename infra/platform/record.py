"""Base of the project's records and settings."""

from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]


class Record(BaseModel):
    """Frozen values. An unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@runtime_checkable
class Placed(Protocol):
    """A request some of whose fields say only where it is computed. Changing those keeps its results and its
    resume points.
    """

    def placement(self) -> Any:
        """The fields, as pydantic's `exclude` takes them."""
