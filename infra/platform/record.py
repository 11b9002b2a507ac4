"""Base of the project's records and settings."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]


class Record(BaseModel):
    """Frozen values; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
