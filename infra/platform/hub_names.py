"""Names of repositories of the Hugging Face hub. Imports nothing of the hub's library."""

import re
from collections.abc import Sequence
from pathlib import Path

from ostinato.infra.platform.record import Record

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?", re.ASCII)


class HubRepository(Record):
    """A repository at a branch, tag or commit."""

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


def find_hub_repository(place: str, file_suffixes: Sequence[str]) -> HubRepository | None:
    """The repository ORG/NAME or ORG/NAME@REVISION. None for an existing path or a name with a file's suffix."""
    found = _NAME.fullmatch(place)
    if found is None or place.endswith(tuple(file_suffixes)) or Path(place).exists():
        return None
    return HubRepository(repository=found[1], revision=found[2] or "main")
