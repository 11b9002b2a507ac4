"""Choice of the arm that answers a session.

A session goes to the candidate when the hash of its id and of the candidate's checkpoint id falls
into the canary's share. So a session keeps its arm, and every candidate draws other sessions.
"""

import hashlib
from dataclasses import dataclass

from ostinato.infra.platform.errors import ConfigError
from ostinato.models.decode.protocol import ModelClient

CONTROL, CANDIDATE = "control", "candidate"


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of an A/B. `weight_version` is the version of `model`."""

    name: str
    checkpoint_id: str
    weight_version: int
    model: ModelClient


class ArmTable:
    """The champion and, during a canary, the candidate. Both change at once, so requests see one state."""

    def __init__(self, control: Arm, candidate: Arm | None = None, share: float = 0.0) -> None:
        self.control, self.candidate, self.share = control, candidate, 0.0
        self.set(control, candidate, share)

    def set(self, control: Arm, candidate: Arm | None = None, share: float = 0.0) -> None:
        """Replaces the arms. Sessions of a removed arm continue on control."""
        if not 0 <= share < 1 or (candidate is None) != (share == 0):
            raise ConfigError(
                f"canary share is {share} with {'a' if candidate else 'no'} candidate, wanted 0 "
                "without one, 0..1 with one"
            )
        self.control, self.candidate, self.share = control, candidate, share

    def choose(self, session_id: str) -> Arm:
        if self.candidate is not None and _position(session_id, self.candidate) < self.share:
            return self.candidate
        return self.control

    @property
    def all(self) -> tuple[Arm, ...]:
        """The arms that serve now."""
        return (self.control,) if self.candidate is None else (self.control, self.candidate)


def _position(session_id: str, candidate: Arm) -> float:
    """A number in 0..1 that depends on session and experiment only."""
    digest = hashlib.sha256(f"{candidate.checkpoint_id}/{session_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
