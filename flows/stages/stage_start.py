"""How a stage under way began: `stage.json` of its run directory."""

from pydantic import Field

from ostinato.infra.platform.artifacts import Identity
from ostinato.infra.platform.record import Record

START_FILE = "stage.json"


class StageStart(Record):
    """Identity that a stage under way began with."""

    identity: Identity
    fingerprint: str
    began_at: float
    changed_files: tuple[str, ...] = Field(default=(), description="code that changed since")
