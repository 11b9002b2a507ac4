"""The only writer of a serving line's champion: promotes, refuses, opens canaries, rolls back.

Every operation may be repeated after a kill. A candidate that was promoted on a scorecard is not
promoted on it again, because it may have been rolled back since.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from pydantic import Field

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import EventRow, InteractionRow, ScorecardRow
from ostinato.infra.serving.gateway.config import SIMULATED_TENANT
from ostinato.tasks.realtime.config import GuardConfig
from ostinato.tasks.realtime.promotion.guard import Advice, judge_canary
from ostinato.tasks.realtime.promotion.observations import (
    CANDIDATE,
    CONTROL,
    observe,
    sessions_of,
    settled,
)
from ostinato.tasks.realtime.promotion.user_groups import UserGroups, group_users
from ostinato.tasks.records import GateDecision, Scorecard, StageRecord

CANARY_STARTED, CANARY_STOPPED = "canary_started", "canary_stopped"
_EARLIER_INTERACTIONS = 20_000  # before a canary, newest first, from which its users are known
_CANARY_ANNOUNCED = "canary_told"  # an event has announced that the guard ended a canary


class PromotionOutcome(StrEnum):
    """Outcome of a candidate."""

    PROMOTED = "promoted"
    REFUSED = "refused"
    CANARY = "canary"  # it answers a share of the sessions until the guard decides
    ROLLED_BACK = "rolled back"
    UNCHANGED = "unchanged"  # decided before, so nothing was done


class PromotionReport(StageRecord):
    """A decision on a candidate, and the line's champion after it."""

    line: str
    outcome: PromotionOutcome
    candidate: str
    reason: str
    champion: str | None


class Canary(StageRecord):
    """A candidate that answers a share of the sessions, while the champion answers the others."""

    decision: GateDecision
    share: float
    from_watermark: int = Field(description="sequence number of the newest interaction before it")
    started_at: float = Field(description="seconds since the epoch")
    groups: UserGroups = Field(
        default=UserGroups(),
        description="users by what they did before it; later feedback changes nothing",
    )

    @property
    def checkpoint_id(self) -> str:
        return self.decision.candidate


class CanaryEnd(StageRecord):
    """End of a canary by the guard."""

    decision: GateDecision = Field(description="decision of the gate that opened it")
    advice: Advice = Field(description="promote, roll back or expire")
    reason: str

    @property
    def checkpoint_id(self) -> str:
        return self.decision.candidate


class ServingLine:
    """Champion and candidate of one group of users. `clock` gives seconds since the epoch."""

    def __init__(self, ledger: Ledger, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self._ledger, self._clock = ledger, clock
        self._source = f"promotion/{name}"

    def publish_candidate(self, scorecard: Scorecard, decision: GateDecision) -> None:
        """Stores the candidate's scorecard and whether its gate passed."""
        self._ledger.scorecards.add(
            ScorecardRow(
                scorecard_id=scorecard.scorecard_id,
                checkpoint_id=scorecard.checkpoint,
                suite=scorecard.suite,
                passed=decision.passed,
                payload=scorecard.model_dump(mode="json"),
                created_at=self._clock(),
            )
        )

    def champion(self) -> str | None:
        """The checkpoint that serves the line. None before the first promotion."""
        pointer = self._ledger.promotions.current(self.name)
        return pointer.checkpoint_id if pointer is not None else None

    def recent_champions(self, candidate: Scorecard, count: int) -> list[Scorecard]:
        """Newest scorecard of each of the line's last `count` champions that were not rolled back.
        Scorecards on other problems or at another temperature than the candidate's are left out.
        """
        active = self._ledger.promotions.active_checkpoints(self.name)
        rows = self._ledger.scorecards.of_suite(candidate.suite, active[-count:])
        cards = [Scorecard.model_validate(row.payload) for row in rows]
        return list(
            {card.checkpoint: card for card in cards if _is_comparable(card, candidate)}.values()
        )

    def was_offered(self, checkpoint_id: str) -> bool:
        """Whether the line ever served the checkpoint, as champion or as canary."""
        champions = self._ledger.promotions.history(self.name)
        return any(entry.checkpoint_id == checkpoint_id for entry in champions) or any(
            event.payload["decision"]["candidate"] == checkpoint_id
            for event in self._events(CANARY_STARTED)
        )

    def decide(self, decision: GateDecision) -> PromotionReport:
        """Promotes a candidate that passed its gate against the current champion, else refuses it. Idempotent."""
        if not decision.passed:
            self._record_decision("refused", decision, decision.reason)
            return self._report(PromotionOutcome.REFUSED, decision.candidate, decision.reason)
        promoted = self._was_promoted(decision) or self._ledger.promotions.promote(
            self.name,
            decision.candidate,
            decision.candidate_scorecard_id,
            decision.reason,
            self._clock(),
            instead_of=decision.champion,
        )
        if not promoted:
            reason = f"compared with {decision.champion}, but the champion is now {self.champion()}"
            self._record_decision("refused", decision, reason)
            return self._report(PromotionOutcome.REFUSED, decision.candidate, reason)
        if self._record_decision("promoted", decision, decision.reason):
            return self._report(PromotionOutcome.PROMOTED, decision.candidate, decision.reason)
        reason = f"decided before by {decision.gate_id}: {decision.reason}"
        return self._report(PromotionOutcome.UNCHANGED, decision.candidate, reason)

    def roll_back(self, checkpoint_id: str, reason: str) -> PromotionReport:
        """Restores the champion before `checkpoint_id` if this is the champion. Otherwise nothing changes."""
        before = self.champion()
        after = self._ledger.promotions.roll_back(
            self.name, reason, self._clock(), checkpoint_id=checkpoint_id
        )
        outcome = PromotionOutcome.UNCHANGED
        if before is not None and before != after.checkpoint_id:
            self._record("rolled_back", {"candidate": checkpoint_id, "reason": reason})
            outcome = PromotionOutcome.ROLLED_BACK
        return self._report(outcome, checkpoint_id, reason)

    def start_canary(self, decision: GateDecision, share: float) -> PromotionReport:
        """Opens an A/B of a candidate that passed its gate. The same decision opens only one."""
        if not any(
            event.payload["decision"]["gate_id"] == decision.gate_id
            for event in self._events(CANARY_STARTED)
        ):
            self.stop_canary(f"replaced by {decision.candidate}")
            watermark = self._ledger.interactions.latest_watermark()
            canary = Canary(
                decision=decision,
                share=share,
                from_watermark=watermark,
                started_at=self._clock(),
                groups=self._groups_before(watermark),
            )
            self._record(CANARY_STARTED, canary.model_dump(mode="json"))
        return self._report(PromotionOutcome.CANARY, decision.candidate, decision.reason)

    def stop_canary(self, reason: str) -> None:
        """Ends the A/B, if one is open."""
        canary = self.canary()
        if canary is not None:
            self._record_end(canary, reason)

    def canary(self) -> Canary | None:
        """The open A/B, or None."""
        newest = self._events(CANARY_STARTED, CANARY_STOPPED, limit_rows=1)
        if not newest or newest[0].name == CANARY_STOPPED:
            return None
        return Canary.model_validate(newest[0].payload)

    def watch_canary(self, config: GuardConfig) -> Canary | None:
        """Judges the open A/B and returns it if it stays open. None: there is none, or the guard ended it now, as
        `unannounced_end` says.

        The A/B ends without a judgement when another champion serves than the one that the gate
        compared with. Of several watchers only one ends it, and the next watcher completes the work of
        a killed one.
        """
        canary = self._judged_canary(config)
        end = self.unannounced_end()
        if end is not None and end.advice is Advice.PROMOTE:
            outcome = self.decide(end.decision).outcome
            if outcome is PromotionOutcome.REFUSED:  # the champion has just changed
                self.note_announced(end)
        return canary

    def unannounced_end(self) -> CanaryEnd | None:
        """The oldest end by the guard that was not announced yet (`note_announced`)."""
        events = self._events(CANARY_STOPPED, _CANARY_ANNOUNCED)
        announced = {
            event.payload["gate_id"] for event in events if event.name == _CANARY_ANNOUNCED
        }
        for event in reversed(events):
            if event.name == CANARY_STOPPED and event.payload.get("end") is not None:
                end = CanaryEnd.model_validate(event.payload["end"])
                if end.decision.gate_id not in announced:
                    return end
        return None

    def last_end(self) -> CanaryEnd | None:
        """The newest end of a canary by the guard. None: there was none."""
        ends = (event.payload.get("end") for event in self._events(CANARY_STOPPED))
        return next((CanaryEnd.model_validate(end) for end in ends if end is not None), None)

    def note_announced(self, end: CanaryEnd) -> None:
        """Records that an end was announced."""
        self._record_once(
            _CANARY_ANNOUNCED, {"gate_id": end.decision.gate_id, "candidate": end.checkpoint_id}
        )

    def _judged_canary(self, config: GuardConfig) -> Canary | None:
        canary = self.canary()
        if canary is None:
            return None
        if self._is_outdated(canary.decision):
            self.stop_canary(f"champion replaced by {self.champion()}")
            return None
        now, rows = self._clock(), self.interactions_during(canary)
        report = judge_canary(
            observe(settled(rows, config, now)),
            config,
            canary.share,
            now - canary.started_at,
            groups=canary.groups,
        )
        if report.advice in (Advice.WAIT, Advice.FINE):
            return canary
        self._record_end(canary, report.reason, report.advice)
        return None

    def _groups_before(self, watermark: int) -> UserGroups:
        """Groups of the people who used the line before an interaction."""
        rows = self._ledger.interactions.since(
            watermark - _EARLIER_INTERACTIONS, watermark, line=self.name
        )
        people = [row for row in rows if row.tenant != SIMULATED_TENANT]
        return group_users(sessions_of(observe(people)))

    def interactions_during(self, canary: Canary) -> list[InteractionRow]:
        """People's interactions with the two checkpoints that the A/B compares, oldest first."""
        checkpoints = {CONTROL: self.champion(), CANDIDATE: canary.checkpoint_id}
        return [
            row
            for row in self._ledger.interactions.since(canary.from_watermark, line=self.name)
            # without those of earlier candidates and champions, and of simulated users
            if row.checkpoint_id == checkpoints[row.arm] and row.tenant != SIMULATED_TENANT
        ]

    def _record_end(self, canary: Canary, reason: str, advice: Advice | None = None) -> None:
        """Records the end of a canary, unless one is recorded. `advice`: of the guard, if it ended the canary."""
        end = None
        if advice is not None:
            end = CanaryEnd(decision=canary.decision, advice=advice, reason=reason)
        self._record_once(
            CANARY_STOPPED,
            {
                "gate_id": canary.decision.gate_id,
                "candidate": canary.checkpoint_id,
                "reason": reason,
                "end": None if end is None else end.model_dump(mode="json"),
            },
        )

    def _is_outdated(self, decision: GateDecision) -> bool:
        """Whether the champion has changed since the candidate was compared with it."""
        return decision.champion not in (None, self.champion()) and (
            decision.candidate != self.champion()
        )

    def _was_promoted(self, decision: GateDecision) -> bool:
        return any(
            entry.action == "promote"
            and entry.checkpoint_id == decision.candidate
            and entry.scorecard_id == decision.candidate_scorecard_id
            for entry in self._ledger.promotions.history(self.name)
        )

    def _report(self, outcome: PromotionOutcome, candidate: str, reason: str) -> PromotionReport:
        return PromotionReport(
            line=self.name,
            outcome=outcome,
            candidate=candidate,
            reason=reason,
            champion=self.champion(),
        )

    def _events(self, *names: str, limit_rows: int | None = None) -> list[EventRow]:
        """The line's events with these names, newest first, however old, because a canary may run for long."""
        return self._ledger.events.recent(self._source, limit_rows, names)

    def _record_decision(self, name: str, decision: GateDecision, reason: str) -> bool:
        return self._record_once(
            name,
            {"gate_id": decision.gate_id, "reason": reason, "candidate": decision.candidate},
        )

    def _record_once(self, name: str, payload: dict[str, Any]) -> bool:
        now = self._clock()
        return self._ledger.events.add_once(self._source, name, payload, now, key="gate_id")

    def _record(self, name: str, payload: dict[str, Any]) -> None:
        self._ledger.events.add(self._source, name, payload, self._clock())


def _is_comparable(card: Scorecard, other: Scorecard) -> bool:
    """Whether two scorecards have the same problems and temperature."""
    return card.temperature == other.temperature and (
        {score.problem_id for score in card.problems}
        == {score.problem_id for score in other.problems}
    )
