"""Observations of a canary: the feedback on each interaction as the guard counts it, and on each session.

`settled` gives the interactions that count at a time, `observe` one observation of each, and `sessions_of` one of each
session, since sessions are what is assigned to arms.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ostinato.infra.platform.ledger.rows import InteractionRow
from ostinato.infra.serving.gateway.signals import Signal, is_informative
from ostinato.tasks.realtime.config import GuardConfig
from ostinato.tasks.records import StageRecord

CONTROL, CANDIDATE = "control", "candidate"
_MOST_OF_AN_EDIT = 0.5  # share of its lines
# measure: field of ArmObservation, and the direction in which the measure is worse
SHARES: dict[str, tuple[str, Literal["less", "greater"]]] = {
    "edit_kept": ("kept", "less"),
    # users who stop giving feedback must not count as users who keep their edits
    "edit_judged": ("is_judged", "less"),
    "edit_survived_10_minutes": ("survived_10_minutes", "less"),
    "edit_survived_60_minutes": ("survived_60_minutes", "less"),
    "dissatisfied": ("dissatisfied", "greater"),
    "abandoned": ("abandoned", "greater"),
}
# measure, which is worse when its median is greater: setting with the factor below which a rise never counts
MEDIANS = {"latency_seconds": "latency_growth", "generated_tokens": "token_growth"}
# measures that users or clients must report, so that their absence says nothing: field
REPORTED = {
    name: SHARES[name][0]
    for name in ("edit_kept", "edit_survived_10_minutes", "edit_survived_60_minutes")
}


class ArmObservation(StageRecord):
    """Feedback on one interaction, or on a whole session, of an arm."""

    arm: str
    session_id: str
    user: str = Field(default="", description="tenant of the user")
    interaction_id: str = Field(
        default="", description="interaction; its last observation replaces earlier ones"
    )
    kept: bool | None = Field(description="False: reverted; None: neither kept nor reverted")
    survived_10_minutes: bool | None = None
    """whether half of the edit's lines were there at the first report between 10 and 60 minutes after the answer;
    None: no report"""
    survived_60_minutes: bool | None = None
    """the same at the first report after 60 minutes"""
    dissatisfied: bool = Field(description="whether a follow-up complained")
    abandoned: bool = Field(default=False, description="whether the user left before looking")
    latency_seconds: float | None
    generated_tokens: float | None = None

    @property
    def is_judged(self) -> bool:
        """Whether the user kept or reverted the edit."""
        return self.kept is not None


def observe(rows: Sequence[InteractionRow]) -> list[ArmObservation]:
    """One observation per interaction. A revert after a keep counts as a revert. A signal with value 0 is ignored."""
    observations = []
    for row in rows:
        said = {event.signal: event for event in row.feedback}
        said = {name: event for name, event in said.items() if is_informative(name, event.value)}
        kept, reverted = said.get(Signal.EDIT_KEPT), said.get(Signal.EDIT_REVERTED)
        outcome: bool | None = None
        if kept is not None or reverted is not None:
            outcome = reverted is None or (
                kept is not None and kept.created_at > reverted.created_at
            )
        latency, tokens = said.get(Signal.LATENCY_SECONDS), said.get(Signal.GENERATED_TOKENS)
        observations.append(
            ArmObservation(
                arm=row.arm,
                session_id=row.session_id,
                user=row.tenant,
                interaction_id=row.interaction_id,
                kept=outcome,
                survived_10_minutes=_survived(row, 600.0, 3_600.0),
                survived_60_minutes=_survived(row, 3_600.0, math.inf),
                dissatisfied=Signal.DISSATISFIED_FOLLOW_UP in said,
                abandoned=Signal.ABANDONED in said,
                latency_seconds=latency.value if latency is not None else None,
                generated_tokens=tokens.value if tokens is not None else None,
            )
        )
    return observations


def _survived(row: InteractionRow, from_seconds: float, to_seconds: float) -> bool | None:
    """Whether half of the edit was there at the first report of an age in [from_seconds, to_seconds). None: no report."""
    reports = [
        (event.created_at, event.value)
        for event in row.feedback
        if event.signal == Signal.EDIT_SURVIVED
        and from_seconds <= event.created_at - row.created_at < to_seconds
    ]
    return min(reports)[1] >= _MOST_OF_AN_EDIT if reports else None


def settled(
    rows: Sequence[InteractionRow], config: GuardConfig, now: float
) -> list[InteractionRow]:
    """Settled interactions with their feedback, ordered by time, up to the first that is too young. Each appears when it
    settles, and again with each later feedback event. So a repeated look sees the same rows, and new ones come last.
    """
    found: list[tuple[float, InteractionRow]] = []
    settled_at = 0.0
    for row in rows:
        settled_at = max(settled_at, row.created_at + config.settle_seconds)
        if settled_at > now:
            break
        said_at = {event.created_at for event in row.feedback}
        for until in {settled_at, *(at for at in said_at if settled_at < at <= now)}:
            said = tuple(event for event in row.feedback if event.created_at <= until)
            found.append((until, row.model_copy(update={"feedback": said})))
    return [row for _, row in sorted(found, key=lambda one: (one[0], one[1].sequence))]


def sessions_of(observations: Sequence[ArmObservation]) -> list[ArmObservation]:
    """One observation for each session: majorities of its interactions, and medians of what has a value."""
    sessions: defaultdict[str, dict[str, ArmObservation]] = defaultdict(dict)
    for number, seen in enumerate(observations):
        sessions[seen.session_id][seen.interaction_id or str(number)] = seen
    return [_summarise(tuple(session.values())) for session in sessions.values()]


def _summarise(session: Sequence[ArmObservation]) -> ArmObservation:
    if len(session) == 1:
        return session[0]
    summary: dict[str, bool | float | None] = {}
    for field, worse in SHARES.values():
        if field in ArmObservation.model_fields:
            values = [value for seen in session if (value := getattr(seen, field)) is not None]
            most = sum(values) + (
                0.5 if worse == "greater" else 0
            )  # of equal halves the bad one counts
            summary[field] = 2 * most > len(values) if values else None
    for field in MEDIANS:
        values = [value for seen in session if (value := getattr(seen, field)) is not None]
        summary[field] = statistics.median(values) if values else None
    return session[0].model_copy(update=summary)
