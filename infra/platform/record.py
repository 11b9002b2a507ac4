"""Base of the project's records and settings."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen values; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
