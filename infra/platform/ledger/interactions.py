"""What users did with deployed checkpoints, and what they said about it.

The order of interactions: `sequence` grows with commit order, so a reader that has seen up to a
watermark misses nothing.
"""

from collections import defaultdict
from typing import Any

from sqlalchemy import func, select

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.models import FeedbackTable, InteractionTable
from ostinato.infra.platform.ledger.rows import FeedbackRow, InteractionRow

_SEQUENCE_LOCK = 71_003


class InteractionRepository:
    """Interactions and feedback."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(
        self,
        interaction_id: str,
        *,
        line: str,
        tenant: str,
        session_id: str,
        arm: str,
        weight_version: int,
        problem_kind: str,
        consent: bool,
        object_key: str,
        created_at: float,
    ) -> None:
        """Add an interaction. A known id changes nothing."""
        row = {
            "interaction_id": interaction_id,
            "line": line,
            "tenant": tenant,
            "session_id": session_id,
            "arm": arm,
            "weight_version": weight_version,
            "problem_kind": problem_kind,
            "consent": consent,
            "object_key": object_key,
            "created_at": created_at,
        }
        with self._database.write() as connection:
            # numbers must become visible in order, or a reader's watermark could pass one unseen
            self._database.serialize(connection, _SEQUENCE_LOCK)
            self._database.insert_absent(connection, InteractionTable, [row])

    def add_feedback(
        self, feedback_id: str, interaction_id: str, signal: str, value: float, created_at: float
    ) -> None:
        """Adds a signal once per feedback id. StorageError for an unknown interaction."""
        row = {
            "feedback_id": feedback_id,
            "interaction_id": interaction_id,
            "signal": signal,
            "value": value,
            "created_at": created_at,
        }
        with self._database.write() as connection:
            known = connection.scalar(
                select(InteractionTable.sequence).where(
                    InteractionTable.interaction_id == interaction_id
                )
            )
            if known is None:
                raise StorageError(
                    f"feedback {feedback_id} is about interaction {interaction_id!r}, "
                    "which was never recorded"
                )
            self._database.insert_absent(connection, FeedbackTable, [row])

    def since(
        self, watermark: int, until: int | None = None, *, line: str | None = None
    ) -> list[InteractionRow]:
        """Interactions of a line (None: all) with watermark < sequence <= until (None: all), each
        with its feedback, in order.
        """
        inside = [InteractionTable.sequence > watermark]
        if line is not None:
            inside.append(InteractionTable.line == line)
        if until is not None:
            inside.append(InteractionTable.sequence <= until)
        return self._select(*inside)

    def get(self, interaction_id: str) -> InteractionRow | None:
        """One interaction."""
        rows = self._select(InteractionTable.interaction_id == interaction_id)
        return rows[0] if rows else None

    def session(self, session_id: str) -> list[InteractionRow]:
        """The turns of one session, in order."""
        return self._select(InteractionTable.session_id == session_id)

    def latest_watermark(self) -> int:
        """Sequence of the newest interaction. 0 when there is none."""
        with self._database.read() as connection:
            return connection.scalar(select(func.max(InteractionTable.sequence))) or 0

    def _select(self, *conditions: Any) -> list[InteractionRow]:
        with self._database.read() as connection:
            found = connection.execute(
                select(InteractionTable.__table__)
                .where(*conditions)
                .order_by(InteractionTable.sequence)
            ).all()
            signals = connection.execute(
                select(FeedbackTable.__table__)
                .join(
                    InteractionTable,
                    InteractionTable.interaction_id == FeedbackTable.interaction_id,
                )
                .where(*conditions)
                .order_by(FeedbackTable.created_at, FeedbackTable.feedback_id)
            ).all()
        by_interaction: defaultdict[str, list[FeedbackRow]] = defaultdict(list)
        for signal in signals:
            by_interaction[signal.interaction_id].append(FeedbackRow.model_validate(signal))
        return [
            InteractionRow(**row._mapping, feedback=tuple(by_interaction[row.interaction_id]))
            for row in found
        ]
