"""Rows of the ledger by kind: artifacts, scorecards, promotions, interactions, cycles and events.

The journal of trajectories is in `journal`. Bytes of artifacts lie in the object store;
`ostinato.infra.platform.artifacts` joins the two.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, or_, select

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.rows import (
    ArtifactRow,
    CycleRow,
    EventRow,
    FeedbackRow,
    InteractionRow,
    NewInteraction,
    PromotionRow,
    ScorecardRow,
)
from ostinato.infra.platform.ledger.tables import (
    ARTIFACTS,
    CYCLES,
    EVENTS,
    FEEDBACK,
    INTERACTIONS,
    LINEAGE,
    PROMOTIONS,
    SCORECARDS,
    SPENDING,
    R,
    RowTable,
)
from ostinato.infra.platform.record import finite

# numbers of Postgres's advisory locks; 71,000 is the migration's and 71,001 the journal's
_ARTIFACTS_LOCK = 71_002
_INTERACTIONS_LOCK = 71_003
_PROMOTIONS_LOCK = 71_004
_EVENTS_LOCK = 71_005
_CYCLES_LOCK = 71_006
_SPENDING_LOCK = 71_007


class LedgerRepository:
    """Rows of one kind."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def _list(
        self,
        table: RowTable[R],
        *conditions: ColumnElement[bool],
        order_by: Any,
        limit_rows: int | None = None,
    ) -> list[R]:
        with self._database.read() as connection:
            return table.list(connection, *conditions, order_by=order_by, limit_rows=limit_rows)

    def _first(self, table: RowTable[R], *conditions: ColumnElement[bool]) -> R | None:
        with self._database.read() as connection:
            return table.first(connection, *conditions)


class ArtifactRepository(LedgerRepository):
    """The index of published artifacts and their lineage."""

    def add(
        self,
        kind: str,
        name: str,
        fingerprint: str,
        *,
        object_prefix: str,
        parents: Sequence[tuple[str, str, str]],
        at: float,
    ) -> ArtifactRow:
        """Adds an artifact under the next version of its name, or returns its row if it is known.

        `parents` are (kind, name, fingerprint) of indexed artifacts; an unknown one raises
        StorageError.
        """
        with self._database.write(_ARTIFACTS_LOCK) as connection:
            known = ARTIFACTS.first(connection, _has_fingerprint(kind, name, fingerprint))
            if known is not None:
                return known
            parent_ids = []
            for parent in parents:
                found = ARTIFACTS.first(connection, _has_fingerprint(*parent))
                if found is None:
                    raise StorageError(
                        f"artifact {kind}/{name} {fingerprint} has parent {'/'.join(parent)}, "
                        "which the ledger does not know; publish parents first"
                    )
                parent_ids.append(found.artifact_id)
            same_name = ARTIFACTS.equals(kind=kind, name=name)
            added = ARTIFACTS.insert(
                connection,
                kind=kind,
                name=name,
                version=ARTIFACTS.highest(connection, "version", same_name) + 1,
                fingerprint=fingerprint,
                object_prefix=object_prefix,
                created_at=at,
            )
            edges = [{"child_id": added.artifact_id, "parent_id": parent} for parent in parent_ids]
            LINEAGE.insert_absent(connection, edges)
        return added

    def find(self, kind: str, name: str, fingerprint: str) -> ArtifactRow | None:
        """The artifact with this fingerprint, if it is indexed."""
        return self._first(ARTIFACTS, _has_fingerprint(kind, name, fingerprint))

    def list(self, kind: str, name: str | None = None) -> list[ArtifactRow]:
        """Artifacts of a kind (and name), oldest version first."""
        wanted = {"kind": kind} if name is None else {"kind": kind, "name": name}
        order = (ARTIFACTS.c.name, ARTIFACTS.c.version)
        return self._list(ARTIFACTS, ARTIFACTS.equals(**wanted), order_by=order)

    def parents(self, artifact_id: int) -> Sequence[ArtifactRow]:
        """Parents of the artifact, in the order of ids."""
        ids = select(LINEAGE.c.parent_id).where(LINEAGE.c.child_id == artifact_id)
        is_parent, order = ARTIFACTS.c.artifact_id.in_(ids), ARTIFACTS.c.artifact_id
        return tuple(self._list(ARTIFACTS, is_parent, order_by=order))


def _has_fingerprint(kind: str, name: str, fingerprint: str) -> ColumnElement[bool]:
    return ARTIFACTS.equals(kind=kind, name=name, fingerprint=fingerprint)


class ScorecardRepository(LedgerRepository):
    """Measurements of checkpoints. The scorecard itself is JSON that the ledger does not read."""

    def add(self, card: ScorecardRow) -> None:
        """Adds a scorecard. For a known id, only the gate's decision is updated, if there is one."""
        with self._database.write() as connection:
            SCORECARDS.insert_absent(connection, [card.model_dump()])
            if card.passed is not None:
                is_known = SCORECARDS.c.scorecard_id == card.scorecard_id
                SCORECARDS.update(connection, is_known, passed=card.passed)

    def of_suite(self, suite: str, checkpoint_ids: Sequence[str]) -> list[ScorecardRow]:
        """Scorecards of these checkpoints on a suite, oldest first."""
        wanted = (SCORECARDS.c.suite == suite, SCORECARDS.c.checkpoint_id.in_(checkpoint_ids))
        return self._list(SCORECARDS, *wanted, order_by=SCORECARDS.c.created_at)

    def of_checkpoint(self, checkpoint_id: str) -> list[ScorecardRow]:
        """All scorecards of a checkpoint, oldest first."""
        wanted = SCORECARDS.c.checkpoint_id == checkpoint_id
        return self._list(SCORECARDS, wanted, order_by=SCORECARDS.c.created_at)

    def get(self, scorecard_id: str) -> ScorecardRow | None:
        return self._first(SCORECARDS, SCORECARDS.c.scorecard_id == scorecard_id)


class PromotionRepository(LedgerRepository):
    """Champions of the serving lines, present and past: the checkpoints that serve their users.

    The newest entry of a line names its champion, so a kill leaves either the old or the new champion.
    """

    def current(self, line: str) -> PromotionRow | None:
        """The champion of a line. None before its first promotion."""
        history = self.history(line)
        return history[-1] if history else None

    def lines(self) -> list[str]:
        """Names of the lines that have a champion."""
        with self._database.read() as connection:
            return sorted(connection.scalars(select(PROMOTIONS.c.line).distinct()))

    def history(self, line: str) -> list[PromotionRow]:
        """All changes of a line's champion, oldest first."""
        return self._list(PROMOTIONS, PROMOTIONS.c.line == line, order_by=PROMOTIONS.c.entry_id)

    def active_checkpoints(self, line: str) -> list[str]:
        """Checkpoints whose promotion was not rolled back, oldest first. The last one serves."""
        return [entry.checkpoint_id for entry in _active(self.history(line))]

    def promote(
        self,
        line: str,
        checkpoint_id: str,
        scorecard_id: str | None,
        reason: str,
        at: float,
        *,
        instead_of: str | None = None,
    ) -> PromotionRow | None:
        """Makes a checkpoint the champion of a line, unless it is already. If `instead_of` is given and is not the
        champion, nothing changes and the result is None.
        """
        with self._database.write(_PROMOTIONS_LOCK) as connection:
            entries = self._entries(connection, line)
            now = entries[-1].checkpoint_id if entries else None
            if now == checkpoint_id:
                return entries[-1]
            if instead_of not in (None, now):
                return None
            entry = {"checkpoint_id": checkpoint_id, "scorecard_id": scorecard_id}
            return PROMOTIONS.insert(
                connection, line=line, action="promote", **entry, reason=reason, at=at
            )

    def roll_back(
        self, line: str, reason: str, at: float, checkpoint_id: str | None = None
    ) -> PromotionRow:
        """Returns to the champion before the current one.

        Nothing changes when `checkpoint_id` is given and is not the champion. StorageError without
        an earlier champion.
        """
        with self._database.write(_PROMOTIONS_LOCK) as connection:
            entries = self._entries(connection, line)
            now = entries[-1] if entries else None
            if now is not None and checkpoint_id not in (None, now.checkpoint_id):
                return now
            active = _active(entries)
            if len(active) < 2:
                seen = now.checkpoint_id if now is not None else None
                raise StorageError(
                    f"cannot roll back line {line} from checkpoint {seen}: no champion before it, "
                    "wanted one"
                )
            entry = active[-2].model_dump(include={"checkpoint_id", "scorecard_id"})
            return PROMOTIONS.insert(
                connection, line=line, action="roll_back", **entry, reason=reason, at=at
            )

    def _entries(self, connection: Connection, line: str) -> list[PromotionRow]:
        is_of_line = PROMOTIONS.c.line == line
        return PROMOTIONS.list(connection, is_of_line, order_by=PROMOTIONS.c.entry_id)


def _active(entries: list[PromotionRow]) -> list[PromotionRow]:
    """Promotions that were not rolled back, with the champion's last. A roll back removes the newest one."""
    active: list[PromotionRow] = []
    for entry in entries:
        if entry.action == "promote":
            active.append(entry)
        else:
            active.pop()
    return active


class InteractionRepository(LedgerRepository):
    """Interactions of users with deployed checkpoints, and their feedback.

    `sequence` grows in commit order, so a reader that has seen all up to a watermark misses nothing.
    """

    def record(self, interaction: NewInteraction) -> None:
        """Adds an interaction. A known id changes nothing."""
        # sequence numbers must become visible in order, or a reader's watermark could pass an unseen row
        with self._database.write(_INTERACTIONS_LOCK) as connection:
            INTERACTIONS.insert_absent(connection, [interaction.model_dump()])

    def add_feedback(self, signal: FeedbackRow) -> None:
        """Adds a signal once per feedback id. StorageError for an unknown interaction."""
        with self._database.write() as connection:
            about = INTERACTIONS.c.interaction_id == signal.interaction_id
            if INTERACTIONS.first(connection, about) is None:
                raise StorageError(
                    f"feedback {signal.feedback_id} is about interaction "
                    f"{signal.interaction_id!r}, which was never recorded"
                )
            FEEDBACK.insert_absent(connection, [signal.model_dump()])

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

    def in_sessions_with_feedback_between(
        self, until: int, *, line: str, after: float, before: float
    ) -> list[InteractionRow]:
        """Interactions of a line with sequence <= until, in order, of all sessions in which one has feedback made in
        (after, before].
        """
        made_then = FEEDBACK.c.created_at > after, FEEDBACK.c.created_at <= before
        seen = INTERACTIONS.c.line == line, INTERACTIONS.c.sequence <= until
        about = INTERACTIONS.c.interaction_id.in_(
            select(FEEDBACK.c.interaction_id).where(*made_then)
        )
        sessions = select(INTERACTIONS.c.session_id).where(*seen, about)
        return self._select(*seen, INTERACTIONS.c.session_id.in_(sessions))

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
        is_about = FEEDBACK.c.interaction_id.in_(wanted)
        order = (FEEDBACK.c.created_at, FEEDBACK.c.feedback_id)
        with self._database.read() as connection:
            rows = INTERACTIONS.list(connection, *conditions, order_by=INTERACTIONS.c.sequence)
            signals = FEEDBACK.list(connection, is_about, order_by=order)
        about: defaultdict[str, list[FeedbackRow]] = defaultdict(list)
        for signal in signals:
            about[signal.interaction_id].append(signal)
        return [
            row.model_copy(update={"feedback": tuple(about[row.interaction_id])}) for row in rows
        ]


class CycleRepository(LedgerRepository):
    """Rounds of the real-time loop: the interactions of each, and the results of its stages."""

    def open(
        self,
        cycle_id: str,
        *,
        line: str,
        served: str,
        from_watermark: int,
        to_watermark: int,
        at: float,
        flow_run_id: str = "",
    ) -> CycleRow:
        """Starts a line's cycle over (from_watermark, to_watermark], or returns the row of a known id.
        Another open cycle of the line raises StorageError.
        """
        with self._database.write(_CYCLES_LOCK) as connection:
            known = CYCLES.first(connection, CYCLES.c.cycle_id == cycle_id)
            if known is not None:
                return known
            other = CYCLES.first(connection, *_is_open(line))
            if other is not None:
                raise StorageError(
                    f"cycle {cycle_id} cannot open: cycle {other.cycle_id} is open since "
                    f"{other.opened_at:.0f}, wanted none; close that one first"
                )
            return CYCLES.insert(
                connection,
                cycle_id=cycle_id,
                line=line,
                served=served,
                from_watermark=from_watermark,
                to_watermark=to_watermark,
                stages={},
                opened_at=at,
                flow_run_id=flow_run_id,
            )

    def take_over(self, cycle_id: str, flow_run_id: str) -> None:
        """Names the flow run that works on a cycle from here on."""
        with self._database.write() as connection:
            _require_cycle(connection, cycle_id)
            CYCLES.update(connection, CYCLES.c.cycle_id == cycle_id, flow_run_id=flow_run_id)

    def closed_by(self, line: str, flow_run_id: str) -> CycleRow | None:
        """The line's cycle that a flow run has closed, if any."""
        is_closed = CYCLES.c.closed_at.is_not(None)
        is_its = CYCLES.equals(line=line, flow_run_id=flow_run_id)
        return self._first(CYCLES, is_its, is_closed) if flow_run_id else None

    def update(self, cycle_id: str, stage: str, payload: dict[str, Any]) -> None:
        """Stores the payload of a stage, replacing an earlier one."""
        with self._database.write(_CYCLES_LOCK) as connection:
            stages = {**_require_cycle(connection, cycle_id).stages, stage: payload}
            CYCLES.update(connection, CYCLES.c.cycle_id == cycle_id, stages=stages)

    def close(self, cycle_id: str, outcome: str, at: float | None = None) -> None:
        """Ends a cycle. A cycle that is closed keeps its first outcome."""
        with self._database.write() as connection:
            _require_cycle(connection, cycle_id)
            is_this = (CYCLES.c.cycle_id == cycle_id, CYCLES.c.closed_at.is_(None))
            closed_at = time.time() if at is None else at
            CYCLES.update(connection, *is_this, outcome=outcome, closed_at=closed_at)

    def open_cycle(self, line: str) -> CycleRow | None:
        """The line's cycle under way, if any."""
        return self._first(CYCLES, *_is_open(line))

    def last_closed_watermark(self, line: str) -> int:
        """Highest watermark of the line's closed cycles. 0 without any."""
        is_closed = CYCLES.c.closed_at.is_not(None)
        with self._database.read() as connection:
            return CYCLES.highest(connection, "to_watermark", CYCLES.c.line == line, is_closed)

    def history(self, line: str) -> list[CycleRow]:
        """All cycles of a line, oldest first."""
        order = (CYCLES.c.opened_at, CYCLES.c.cycle_id)
        return self._list(CYCLES, CYCLES.c.line == line, order_by=order)


def _is_open(line: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return CYCLES.c.line == line, CYCLES.c.closed_at.is_(None)


def _require_cycle(connection: Connection, cycle_id: str) -> CycleRow:
    found = CYCLES.first(connection, CYCLES.c.cycle_id == cycle_id)
    if found is None:
        raise StorageError(f"cycle {cycle_id!r} is not in the ledger, wanted an opened one")
    return found


class SpendingRepository(LedgerRepository):
    """Tokens that accounts of the gateway used, by day."""

    def add(self, tokens: Mapping[tuple[int, str], int], day: int) -> dict[str, int]:
        """Adds tokens to the counts of (day, account), and returns all counts of `day` by account."""
        if not tokens:
            rows = self._list(SPENDING, SPENDING.c.day == day, order_by=SPENDING.c.account)
            return {row.account: row.tokens for row in rows}
        new = [{"day": day, "account": account, "tokens": 0} for day, account in tokens]
        with self._database.write(_SPENDING_LOCK) as connection:
            SPENDING.insert_absent(connection, new)
            for (of_day, account), number in tokens.items():
                is_this = SPENDING.equals(day=of_day, account=account)
                SPENDING.update(connection, is_this, tokens=SPENDING.c.tokens + number)
            rows = SPENDING.list(connection, SPENDING.c.day == day, order_by=SPENDING.c.account)
        return {row.account: row.tokens for row in rows}


class EventRepository(LedgerRepository):
    """Alarms, promotions and canaries, as they happened. Append only."""

    def add(self, source: str, name: str, payload: dict[str, Any], at: float) -> None:
        """Appends an event. Numbers that JSON lacks (NaN, infinity) are kept as text."""
        with self._database.write() as connection:
            EVENTS.insert(connection, source=source, name=name, payload=finite(payload), at=at)

    def add_once(
        self, source: str, name: str, payload: dict[str, Any], at: float, *, key: str
    ) -> bool:
        """Appends an event unless the source has one of that name with the same `payload[key]`. Returns whether it
        was appended: of several concurrent callers, one gets True.
        """
        with self._database.write(_EVENTS_LOCK) as connection:
            alike = EVENTS.equals(source=source, name=name)
            known = EVENTS.list(connection, alike, order_by=EVENTS.c.event_id)
            if any(event.payload.get(key) == payload[key] for event in known):
                return False
            EVENTS.insert(connection, source=source, name=name, payload=finite(payload), at=at)
            return True

    def recent(
        self,
        source: str | None = None,
        limit_rows: int | None = 100,
        names: Collection[str] | None = None,
    ) -> list[EventRow]:
        """Events, newest first. `limit_rows` None: all of them."""
        wanted = [] if source is None else [EVENTS.c.source == source]
        if names is not None:
            wanted.append(EVENTS.c.name.in_(names))
        return self._list(EVENTS, *wanted, order_by=EVENTS.c.event_id.desc(), limit_rows=limit_rows)
