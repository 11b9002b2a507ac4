"""Problem sets that ship with the project: `sets/NAME.jsonl.zst` and the card `sets/NAME.json`. Each set
belongs to one configuration.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import zstandard
from pydantic import Field

import ostinato
from ostinato.infra.platform.artifacts import fingerprint
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.record import Record
from ostinato.tasks.problems.config import ProblemsConfig, ProblemsResult

# A path from the root keeps the sets out of a stage's code identity, which contains the checksum of the
# stage's own set instead.
SETS = Path(ostinato.__file__).parent / "tasks/problems/sets"
MAX_BYTES = 256 << 20  # of the uncompressed lines of a set


class DatasetCard(Record):
    """Card of a shipped problem set."""

    config: str = Field(description="fingerprint of the configuration")
    sha256: str = Field(description="SHA-256 of the uncompressed lines of problems")
    result: ProblemsResult = Field(description="result of the build, with an empty directory")


def find_set(config: ProblemsConfig, folder: Path = SETS) -> tuple[DatasetCard, bytes] | None:
    """Card and problems of the set that ships for a configuration, or None."""
    path = _find_card(config, folder)
    if path is None:
        return None
    card, packed = _read_card(path), path.with_suffix(".jsonl.zst")
    lines = decompress(packed)
    found = hashlib.sha256(lines).hexdigest()
    if found != card.sha256:
        raise ProblemError(f"{packed} has sha256 {found}, wanted {card.sha256}; restore it")
    return card, lines


def shipped_checksum(config: ProblemsConfig, folder: Path = SETS) -> str | None:
    """SHA-256 of the set that ships for a configuration, from its card. None: there is no set."""
    path = _find_card(config, folder)
    return None if path is None else _read_card(path).sha256


def _find_card(config: ProblemsConfig, folder: Path) -> Path | None:
    wanted = fingerprint(config)
    paths = sorted(folder.glob("*.json"))
    return next((path for path in paths if _read_card(path).config == wanted), None)


def _read_card(path: Path) -> DatasetCard:
    return DatasetCard.model_validate_json(path.read_bytes())


def decompress(packed: Path) -> bytes:
    """The lines of a packed set. ProblemError if they exceed MAX_BYTES or cannot be unpacked."""
    content = packed.read_bytes()
    try:
        size = zstandard.frame_content_size(content)
        if not 0 <= size <= MAX_BYTES:
            raise ProblemError(
                f"{packed} says it holds {size} bytes, wanted at most {MAX_BYTES}; restore it"
            )
        return zstandard.ZstdDecompressor().decompress(content)
    except zstandard.ZstdError as error:
        raise ProblemError(f"{packed} cannot be read: {error}; restore it") from error


def check_repositories(card: DatasetCard, prepared: Mapping[str, str]) -> None:
    """Raises ProblemError for repositories that differ from those of the proofs. `prepared`: name -> fingerprint."""
    wanted = card.result.repositories
    different = {name: prepared.get(name) for name in wanted if prepared.get(name) != wanted[name]}
    if different:
        raise ProblemError(
            f"shipped problem set {card.config}: prepared repositories are {different}, wanted "
            f"{ {name: wanted[name] for name in different} }; their archives must be the pinned ones"
        )
