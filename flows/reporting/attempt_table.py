"""The attempts of an RL run as lines of a table, from the journal and the stored groups."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from pydantic import Field

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import JournalRow, JournalState
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.record import Record
from ostinato.tasks.records import Trajectory
from ostinato.tasks.rollout.payload import group_from_bytes

MAX_LINES = 5_000
_KEPT_GROUPS = 4_000  # of which a process keeps the lines


class AttemptLine(Record):
    """One attempt. Fields from `solved` on are None when its group is not stored."""

    trajectory_id: str
    group_id: str
    problem_id: str
    step: int | None = Field(description="step that trained on it; None: none yet")
    state: str = Field(description="state in the journal")
    outcome: str | None
    reward: float | None
    weight_version: int = Field(description="version of the weights at its start")
    solved: bool | None = None
    turns: int | None = None
    calls: int | None = None
    tokens: int | None = Field(default=None, description="sampled tokens")
    seconds: float | None = None


class AttemptTable:
    """Reader of a home's attempts. Stored groups never change, so each is read once."""

    def __init__(self, ledger: Ledger, objects: ObjectStore) -> None:
        self._ledger, self._objects = ledger, objects
        self._stored: dict[str, dict[str, dict[str, Any]]] = {}  # by key and attempt

    def lines(self, run_id: str) -> list[AttemptLine]:
        """The newest MAX_LINES ended attempts of a run, newest first."""
        rows = self._ledger.journal.rows(run_id)
        ended = [row for row in rows if row.state is not JournalState.RESERVED]
        return list(self._lines(ended[-MAX_LINES:]))[::-1]

    def _lines(self, rows: Sequence[JournalRow]) -> Iterator[AttemptLine]:
        for key, members in groupby(rows, key=lambda row: row.object_key):
            stored = {} if key is None else self._read(key)
            for row in members:
                yield AttemptLine(
                    trajectory_id=row.trajectory_id,
                    group_id=row.group_id,
                    problem_id=row.problem_id,
                    step=row.trained_step,
                    state=row.state.value,
                    outcome=row.outcome,
                    reward=row.reward,
                    weight_version=row.weight_version,
                    **stored.get(row.trajectory_id, {}),
                )

    def _read(self, key: str) -> dict[str, dict[str, Any]]:
        if key not in self._stored:
            if not self._objects.exists(key):
                return {}
            group = group_from_bytes(self._objects.get_bytes(key))
            if len(self._stored) >= _KEPT_GROUPS:
                self._stored.clear()
            self._stored[key] = {one.trajectory_id: _measures(one) for one in group.trajectories}
        return self._stored[key]


def _measures(attempt: Trajectory) -> dict[str, Any]:
    turns = attempt.transcript.turns
    return {
        "solved": attempt.is_solved,
        "turns": len(turns),
        "calls": sum(len(turn.calls) for turn in turns),
        "tokens": sum(turn.generated_tokens for turn in turns),
        "seconds": attempt.finished_at - attempt.started_at,
    }
