"""One request that waits for room on a replica.

Users come before evaluation, and evaluation before training.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.models.decode.protocol import Priority

RANKS = {Priority.USER: 0, Priority.EVALUATION: 1, Priority.TRAINING: 2}


@dataclass(eq=False, slots=True)
class Ticket:
    """One waiting request."""

    session_id: str
    tokens: int
    context_tokens: int
    priority: Priority
    on_placed: Callable[[], None]
    replica_id: str | None = None

    def place_on(self, replica_id: str | None) -> bool:
        """Note the replica that has room. False when none has."""
        if replica_id is None:
            return False
        self.replica_id = replica_id
        self.on_placed()
        return True
