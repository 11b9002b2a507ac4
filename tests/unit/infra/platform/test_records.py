"""Descriptions of fields are read from the source when they are shown, and their absence harms nothing."""

from typing import Generic, TypeVar

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.models.record import field_docstrings

Content = TypeVar("Content")


class Base(Record):
    """A table."""

    first: int = 0
    """the first
    of all"""
    second: int = Field(default=0, description="given beside it")
    third: int = 0


class Extended(Base):
    """A table that says more of one field."""

    first: int = 1
    """another first"""


class Holding(Record, Generic[Content]):
    """A table of anything."""

    content: Content
    """what it holds"""


def described(model: type[Record]) -> dict[str, str | None]:
    fields = model.model_json_schema()["properties"]
    return {name: field.get("description") for name, field in fields.items()}


def test_a_schema_holds_the_strings_below_fields() -> None:
    wanted = {"first": "the first\nof all", "second": "given beside it", "third": None}
    assert described(Base) == wanted
    assert described(Extended) == wanted | {"first": "another first"}


def test_a_record_made_at_run_time_has_what_its_parents_say() -> None:
    assert described(Holding[int]) == {"content": "what it holds"}
    made = type("Made", (Base,), {"__module__": "nowhere"})
    assert field_docstrings(made)["first"] == "the first\nof all"
