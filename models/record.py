"""Base of the project's records and settings, free of tensors so that recipes can hold them."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen values. An unknown field is an error, and so is a number that is not finite: JSON has none.

    The description of a field that does not fit beside it stands below it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
