"""Interactions of users with deployed checkpoints, and their feedback.

`sequence` grows in commit order, so a reader that has seen all up to a watermark misses nothing.
"""

from collections import defaultdict

from sqlalchemy import ColumnElement, or_, select

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.database import Repository
from ostinato.infra.platform.ledger.rows import FeedbackRow, InteractionRow, NewInteraction
from ostinato.infra.platform.ledger.tables import FEEDBACK, INTERACTIONS

_SEQUENCE_LOCK = 71_003


class InteractionRepository(Repository):
    """Interactions and feedback."""

    def record(self, interaction: NewInteraction) -> None:
        """Add an interaction. A known id changes nothing."""
        with self._database.write() as connection:
            # numbers must become visible in order, or a reader's watermark could pass one unseen
            self._database.serialize(connection, _SEQUENCE_LOCK)
            self._database.insert_absent(connection, INTERACTIONS.table, [interaction.model_dump()])

    def add_feedback(self, signal: FeedbackRow) -> None:
        """Adds a signal once per feedback id. StorageError for an unknown interaction."""
        with self._database.write() as connection:
            about = INTERACTIONS.c.interaction_id == signal.interaction_id
            if INTERACTIONS.first(connection, about) is None:
                raise StorageError(
                    f"feedback {signal.feedback_id} is about interaction "
                    f"{signal.interaction_id!r}, which was never recorded"
                )
            self._database.insert_absent(connection, FEEDBACK.table, [signal.model_dump()])

    def since(
        self, watermark: int, until: int | None = None, *, line: str | None = None
    ) -> list[InteractionRow]:
        """Interactions of a line (None: all) with watermark < sequence <= until, each with its feedback."""
        inside = [INTERACTIONS.c.sequence > watermark]
        if line is not None:
            inside.append(INTERACTIONS.c.line == line)
        if until is not None:
            inside.append(INTERACTIONS.c.sequence <= until)
        return self._select(*inside)

    def said_about(
        self, until: int, *, line: str, after: float, before: float
    ) -> list[InteractionRow]:
        """Interactions of a line with sequence <= until and feedback made in (after, before], in order."""
        said = select(FEEDBACK.c.interaction_id).where(
            FEEDBACK.c.created_at > after, FEEDBACK.c.created_at <= before
        )
        return self._select(
            INTERACTIONS.c.line == line,
            INTERACTIONS.c.sequence <= until,
            INTERACTIONS.c.interaction_id.in_(said),
        )

    def get(self, interaction_id: str) -> InteractionRow | None:
        rows = self._select(INTERACTIONS.c.interaction_id == interaction_id)
        return rows[0] if rows else None

    def named(self, name: str) -> list[InteractionRow]:
        """The interaction of this id, or the interactions of the session of this id, in order."""
        columns = (INTERACTIONS.c.interaction_id, INTERACTIONS.c.session_id)
        return self._select(or_(*(column == name for column in columns)))

    def latest_watermark(self) -> int:
        """Sequence of the newest interaction. 0 when there is none."""
        with self._database.read() as connection:
            return INTERACTIONS.highest(connection, "sequence")

    def _select(self, *conditions: ColumnElement[bool]) -> list[InteractionRow]:
        wanted = select(INTERACTIONS.c.interaction_id).where(*conditions)
        with self._database.read() as connection:
            rows = INTERACTIONS.list(connection, *conditions, order_by=INTERACTIONS.c.sequence)
            signals = FEEDBACK.list(
                connection,
                FEEDBACK.c.interaction_id.in_(wanted),
                order_by=(FEEDBACK.c.created_at, FEEDBACK.c.feedback_id),
            )
        said: defaultdict[str, list[FeedbackRow]] = defaultdict(list)
        for signal in signals:
            said[signal.interaction_id].append(signal)
        return [
            row.model_copy(update={"feedback": tuple(said[row.interaction_id])}) for row in rows
        ]
