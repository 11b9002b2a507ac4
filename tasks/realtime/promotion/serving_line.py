"""Promote, refuse, canary, roll back: the only writer of a serving line's champion.

Every operation may be repeated after a kill: a candidate that was promoted once on a scorecard is
not promoted on it again (it may have been rolled back since).
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from pydantic import Field

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import EventRow, InteractionRow, ScorecardRow
from ostinato.infra.serving.gateway.config import SIMULATED_TENANT
from ostinato.tasks.realtime.config import GuardConfig
from ostinato.tasks.realtime.promotion.guard import (
    CANDIDATE,
    CONTROL,
    Advice,
    judge_canary,
    observe,
    settled,
)
from ostinato.tasks.records import GateDecision, Scorecard, StageRecord

CANARY_STARTED, CANARY_STOPPED = "canary_started", "canary_stopped"
_CANARY_TOLD = "canary_told"  # an end by the guard was announced as an event


class PromotionOutcome(StrEnum):
    """Outcome of a candidate."""

    PROMOTED = "promoted"
    REFUSED = "refused"
    CANARY = "canary"  # answers a share of the sessions until the guard decides
    ROLLED_BACK = "rolled back"
    UNCHANGED = "unchanged"  # decided before: nothing was done now


class PromotionReport(StageRecord):
    """One decision with its reason and the line's champion after it."""

    line: str
    outcome: PromotionOutcome
    candidate: str
    reason: str
    champion: str | None


class Canary(StageRecord):
    """A candidate that serves a share of the sessions beside the champion."""

    decision: GateDecision
    share: float
    from_watermark: int = Field(description="interactions up to here are older than the canary")
    started_at: float = Field(description="seconds since the epoch")

    @property
    def checkpoint_id(self) -> str:
        return self.decision.candidate


class CanaryEnd(StageRecord):
    """End of a canary by the guard."""

    decision: GateDecision = Field(description="decision of the gate that began it")
    advice: Advice = Field(description="promote, roll back: users fared worse, or expire")
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
        """Keeps the candidate's scorecard with the gate's decision."""
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
        """Checkpoint that serves the line. None before the first promotion."""
        pointer = self._ledger.promotions.current(self.name)
        return pointer.checkpoint_id if pointer is not None else None

    def recent_champions(self, candidate: Scorecard, count: int) -> list[Scorecard]:
        """Scorecards of the line's newest champions that compare with the candidate's: one each,
        the newest. What was rolled back and what was measured on other problems is not among them.
        """
        standing = self._ledger.promotions.active_checkpoints(self.name)
        rows = self._ledger.scorecards.of_suite(candidate.suite, standing[-count:])
        cards = [Scorecard.model_validate(row.payload) for row in rows]
        return list({card.checkpoint: card for card in cards if _compare(card, candidate)}.values())

    def was_offered(self, checkpoint_id: str) -> bool:
        """Whether users of the line ever got the checkpoint: as champion, or as canary."""
        champions = self._ledger.promotions.history(self.name)
        return any(entry.checkpoint_id == checkpoint_id for entry in champions) or any(
            event.payload["decision"]["candidate"] == checkpoint_id
            for event in self._events(CANARY_STARTED)
        )

    def decide(self, decision: GateDecision) -> PromotionReport:
        """Promotes a candidate whose gate passed against the champion of now, else refuses it. Idempotent."""
        if not decision.passed:
            self._note_decision("refused", decision, decision.reason)
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
            reason = (
                f"compared with {decision.champion}, and the champion is {self.champion()} by now"
            )
            self._note_decision("refused", decision, reason)
            return self._report(PromotionOutcome.REFUSED, decision.candidate, reason)
        if self._note_decision("promoted", decision, decision.reason):
            return self._report(PromotionOutcome.PROMOTED, decision.candidate, decision.reason)
        reason = f"decided before by {decision.gate_id}: {decision.reason}"
        return self._report(PromotionOutcome.UNCHANGED, decision.candidate, reason)

    def roll_back(self, checkpoint_id: str, reason: str) -> PromotionReport:
        """Takes `checkpoint_id` from users if it is the champion. Otherwise nothing changes."""
        before = self.champion()
        after = self._ledger.promotions.roll_back(
            self.name, reason, self._clock(), checkpoint_id=checkpoint_id
        )
        outcome = PromotionOutcome.UNCHANGED
        if before is not None and before != after.checkpoint_id:
            self._note("rolled_back", {"candidate": checkpoint_id, "reason": reason})
            outcome = PromotionOutcome.ROLLED_BACK
        return self._report(outcome, checkpoint_id, reason)

    def start_canary(self, decision: GateDecision, share: float) -> PromotionReport:
        """Opens an A/B of a candidate whose gate passed. The same decision opens one only once."""
        if not any(
            event.payload["decision"]["gate_id"] == decision.gate_id
            for event in self._events(CANARY_STARTED)
        ):
            self.stop_canary(f"replaced by {decision.candidate}")
            canary = Canary(
                decision=decision,
                share=share,
                from_watermark=self._ledger.interactions.latest_watermark(),
                started_at=self._clock(),
            )
            self._note(CANARY_STARTED, canary.model_dump(mode="json"))
        return self._report(PromotionOutcome.CANARY, decision.candidate, decision.reason)

    def stop_canary(self, reason: str) -> None:
        """Ends the A/B, if one is open."""
        now = self.canary()
        if now is not None:
            self._note_end(now, reason)

    def canary(self) -> Canary | None:
        """The open A/B."""
        newest = self._events(CANARY_STARTED, CANARY_STOPPED, limit_rows=1)
        if not newest or newest[0].name == CANARY_STOPPED:
            return None
        return Canary.model_validate(newest[0].payload)

    def watch_canary(self, config: GuardConfig) -> Canary | None:
        """The A/B that stays open. None: there is none, or the guard ended it now; `unannounced_end` has how.

        A/B and gate compared the candidate with one champion: once another one serves, the A/B ends
        unjudged. Of several watchers only one ends it, and what a killed watcher leaves undone the
        next one does.
        """
        canary = self._judged_canary(config)
        end = self.unannounced_end()
        if end is not None and end.advice is Advice.PROMOTE:
            outcome = self.decide(end.decision).outcome
            if outcome is PromotionOutcome.REFUSED:  # another champion came just now
                self.note_announced(end)
        return canary

    def unannounced_end(self) -> CanaryEnd | None:
        """The oldest end by the guard that was not announced yet (`note_announced`)."""
        events = self._events(CANARY_STOPPED, _CANARY_TOLD)
        told = {event.payload["gate_id"] for event in events if event.name == _CANARY_TOLD}
        for event in reversed(events):
            if event.name == CANARY_STOPPED and event.payload.get("end") is not None:
                end = CanaryEnd.model_validate(event.payload["end"])
                if end.decision.gate_id not in told:
                    return end
        return None

    def note_announced(self, end: CanaryEnd) -> None:
        """Records that an end was announced."""
        self._note_once(
            _CANARY_TOLD, {"gate_id": end.decision.gate_id, "candidate": end.checkpoint_id}
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
            observe(settled(rows, config, now)), config, canary.share, now - canary.started_at
        )
        if report.advice in (Advice.WAIT, Advice.FINE):
            return canary
        self._note_end(canary, report.reason, report.advice)
        return None

    def interactions_during(self, canary: Canary) -> list[InteractionRow]:
        """People's interactions with the two checkpoints that the A/B compares, oldest first."""
        serves = {CONTROL: self.champion(), CANDIDATE: canary.checkpoint_id}
        return [
            row
            for row in self._ledger.interactions.since(canary.from_watermark, line=self.name)
            # not of an earlier candidate or champion, and nobody simulates users of a candidate
            if row.checkpoint_id == serves[row.arm] and row.tenant != SIMULATED_TENANT
        ]

    def _note_end(self, canary: Canary, reason: str, advice: Advice | None = None) -> None:
        """`advice`: the guard's. What is noted first stands."""
        end = None
        if advice is not None:
            end = CanaryEnd(decision=canary.decision, advice=advice, reason=reason)
        self._note_once(
            CANARY_STOPPED,
            {
                "gate_id": canary.decision.gate_id,
                "candidate": canary.checkpoint_id,
                "reason": reason,
                "end": None if end is None else end.model_dump(mode="json"),
            },
        )

    def _is_outdated(self, decision: GateDecision) -> bool:
        """Whether the candidate was compared with another checkpoint than users get by now."""
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
        """The line's events of those names, newest first. All, however old: a canary may run for long."""
        return self._ledger.events.recent(self._source, limit_rows, names)

    def _note_decision(self, name: str, decision: GateDecision, reason: str) -> bool:
        return self._note_once(
            name,
            {"gate_id": decision.gate_id, "reason": reason, "candidate": decision.candidate},
        )

    def _note_once(self, name: str, payload: dict[str, Any]) -> bool:
        now = self._clock()
        return self._ledger.events.add_once(self._source, name, payload, now, key="gate_id")

    def _note(self, name: str, payload: dict[str, Any]) -> None:
        self._ledger.events.add(self._source, name, payload, self._clock())


def _compare(card: Scorecard, other: Scorecard) -> bool:
    """Whether two scorecards are of the same problems, solved in the same way."""
    return card.temperature == other.temperature and (
        {score.problem_id for score in card.problems}
        == {score.problem_id for score in other.problems}
    )
