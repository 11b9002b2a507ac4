"""The online guard: tests whether users of the candidate arm are worse off.

`observe` (interaction rows to one observation each), `compare_arms` (one-sided tests of edits kept
and judged at all, dissatisfied follow-ups and latency, with Holm's correction) and `judge_canary`
(the sequence of such tests over a canary). Sessions are the unit of randomisation, so each counts
once however long it is. Nothing is promoted before enough sessions of both arms were judged by their
users. It moves no pointer: serving_line.py does.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import numpy as np
import scipy  # its parts load when first used: scipy.stats takes a second
from pydantic import Field

from ostinato.infra.platform.ledger.rows import InteractionRow
from ostinato.infra.serving.gateway.signals import Signal, is_said
from ostinato.tasks.evaluation.statistics import mean
from ostinato.tasks.realtime.config import GuardConfig
from ostinato.tasks.records import StageRecord

CONTROL, CANDIDATE = "control", "candidate"
_MISMATCH_P = 1e-4  # sessions dealt out otherwise than asked: no comparison of arms means anything
_STARVED_P = 1e-6  # the same before a look, asked after every session


class ArmObservation(StageRecord):
    """Evidence of one interaction, or of a whole session, about its arm."""

    arm: str
    session_id: str
    interaction_id: str = Field(
        default="", description="the last observation of an interaction stands for it"
    )
    kept: bool | None = Field(description="None: neither kept nor reverted")
    dissatisfied: bool
    latency_seconds: float | None


class Advice(StrEnum):
    """Advice of the guard."""

    WAIT = "wait"  # too few sessions
    FINE = "fine"  # no measure is significantly worse
    PROMOTE = "promote"  # fine at every look, the last included
    ROLL_BACK = "roll_back"  # users of the candidate are worse off
    EXPIRE = "expire"  # too few sessions or judgements until the canary's last day


class ArmMeasure(StageRecord):
    """One measure on both arms."""

    name: str
    control: float
    candidate: float
    control_count: int
    candidate_count: int
    p_value: float
    """one-sided: chance of this much worse if the arms were alike"""
    worse: bool = Field(description="significant after Holm's correction")


class GuardReport(StageRecord):
    """The comparison with its advice."""

    advice: Advice
    reason: str
    measures: tuple[ArmMeasure, ...]


def observe(rows: Sequence[InteractionRow]) -> list[ArmObservation]:
    """One observation per interaction. A revert after a keep counts as a revert, a value of 0 as nothing."""
    observations = []
    for row in rows:
        said = {event.signal: event for event in row.feedback}
        said = {name: event for name, event in said.items() if is_said(name, event.value)}
        kept, reverted = said.get(Signal.EDIT_KEPT), said.get(Signal.EDIT_REVERTED)
        outcome: bool | None = None
        if kept is not None or reverted is not None:
            outcome = reverted is None or (
                kept is not None and kept.created_at > reverted.created_at
            )
        latency = said.get(Signal.LATENCY_SECONDS)
        observations.append(
            ArmObservation(
                arm=row.arm,
                session_id=row.session_id,
                interaction_id=row.interaction_id,
                kept=outcome,
                dissatisfied=Signal.DISSATISFIED_FOLLOW_UP in said or Signal.ABANDONED in said,
                latency_seconds=latency.value if latency is not None else None,
            )
        )
    return observations


def settled(
    rows: Sequence[InteractionRow], config: GuardConfig, now: float
) -> list[InteractionRow]:
    """Interactions in order up to the first that is too young, each with what was said in time, and again
    with each thing said later, all in the order of time.

    New rows come last, so a look repeated later sees the same.
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


def judge_canary(
    observations: Sequence[ArmObservation], config: GuardConfig, share: float, age_seconds: float
) -> GuardReport:
    """Advice on an open canary from its observations in order. It may be asked at any time.

    The arms are compared at sizes fixed beforehand, each with an equal part of the significance, so
    asking often adds no chance of a false alarm. A canary that waits at its last day expires.
    """
    for look in range(config.looks):
        seen, report = _look_at(observations, config, look)
        if report.advice is Advice.WAIT:
            return _while_waiting(observations, report, config, share, age_seconds)
        mismatch = _find_mismatch(seen, share)
        if mismatch:
            return GuardReport(advice=Advice.ROLL_BACK, reason=mismatch, measures=report.measures)
        if report.advice is Advice.ROLL_BACK or look == config.looks - 1:
            break
    if report.advice is Advice.ROLL_BACK:
        return report
    is_old = age_seconds >= config.minimum_seconds
    return report.model_copy(update={"advice": Advice.PROMOTE if is_old else Advice.WAIT})


def _while_waiting(
    observations: Sequence[ArmObservation],
    report: GuardReport,
    config: GuardConfig,
    share: float,
    age_seconds: float,
) -> GuardReport:
    """The report of a look that is not due, or why the canary ends without it."""
    starved = _find_mismatch(observations, share, _STARVED_P)
    if starved:
        return report.model_copy(update={"advice": Advice.ROLL_BACK, "reason": starved})
    if age_seconds < config.maximum_seconds:
        return report
    reason = f"undecided after {age_seconds / 3_600:.1f} h: {report.reason}"
    return report.model_copy(update={"advice": Advice.EXPIRE, "reason": reason})


def last_look(
    observations: Sequence[ArmObservation], config: GuardConfig
) -> tuple[int, GuardReport | None]:
    """How many looks both arms have had enough sessions for, and what the last of them said."""
    found = None
    for look in range(config.looks):
        _, report = _look_at(observations, config, look)
        if report.advice is Advice.WAIT:
            return look, found
        found = report
    return config.looks, found


def _look_at(
    observations: Sequence[ArmObservation], config: GuardConfig, look: int
) -> tuple[list[ArmObservation], GuardReport]:
    """The observations that a look is made on, and what it says."""
    wanted = config.model_copy(
        update={
            "significance": config.significance / config.looks,
            "minimum_sessions": config.minimum_sessions << look,
            # a bad candidate is withdrawn on less than a promotion asks for
            "minimum_judged_sessions": (
                config.minimum_judged_sessions if look == config.looks - 1 else 0
            ),
        }
    )
    seen = _first_of_both(observations, wanted)
    return seen, compare_arms(seen, wanted)


def _first_of_both(
    observations: Sequence[ArmObservation], config: GuardConfig
) -> list[ArmObservation]:
    """The observations up to the one with which both arms have enough sessions, and judged ones."""
    found: list[ArmObservation] = []
    sessions: dict[str, set[str]] = {CONTROL: set(), CANDIDATE: set()}
    judged: dict[str, set[str]] = {CONTROL: set(), CANDIDATE: set()}
    for seen in observations:
        if (
            min(len(names) for names in sessions.values()) >= config.minimum_sessions
            and min(len(names) for names in judged.values()) >= config.minimum_judged_sessions
        ):
            break
        found.append(seen)
        sessions[seen.arm].add(seen.session_id)
        if seen.kept is not None:
            judged[seen.arm].add(seen.session_id)
    return found


def _sessions_of(observations: Sequence[ArmObservation], arm: str) -> list[ArmObservation]:
    """One observation for each session of the arm: what holds for at least half of it, and median latency."""
    sessions: defaultdict[str, dict[str, ArmObservation]] = defaultdict(dict)
    for number, seen in enumerate(observations):
        if seen.arm == arm:
            sessions[seen.session_id][seen.interaction_id or str(number)] = seen
    return [_as_one(tuple(session.values())) for session in sessions.values()]


def _as_one(session: Sequence[ArmObservation]) -> ArmObservation:
    if len(session) == 1:
        return session[0]
    kept = _kept(session)
    waits = [seen.latency_seconds for seen in session if seen.latency_seconds is not None]
    return session[0].model_copy(
        update={
            "kept": 2 * sum(kept) > len(kept) if kept else None,
            "dissatisfied": 2 * sum(seen.dissatisfied for seen in session) >= len(session),
            "latency_seconds": statistics.median(waits) if waits else None,
        }
    )


def _find_mismatch(
    observations: Sequence[ArmObservation], share: float, significance: float = _MISMATCH_P
) -> str:
    """Why sessions cannot have been dealt out by the share (binomial test). Empty: they can."""
    sessions = {(seen.arm, seen.session_id) for seen in observations}
    of_candidate = sum(arm == CANDIDATE for arm, _ in sessions)
    if not sessions:
        return ""
    p_value = scipy.stats.binomtest(of_candidate, len(sessions), share).pvalue
    if p_value >= significance:
        return ""
    return (
        f"sample ratio mismatch: the candidate has {of_candidate} of {len(sessions)} sessions, "
        f"wanted a share of {share:g} (p={p_value:.2g})"
    )


def compare_arms(observations: Sequence[ArmObservation], config: GuardConfig) -> GuardReport:
    """Compares the sessions of the candidate arm with those of control."""
    control = _sessions_of(observations, CONTROL)
    candidate = _sessions_of(observations, CANDIDATE)
    judged = min(len(_kept(control)), len(_kept(candidate)))
    short = ""
    if min(len(control), len(candidate)) < config.minimum_sessions:
        short = (
            f"{len(control)} control and {len(candidate)} candidate sessions, "
            f"wanted {config.minimum_sessions} each"
        )
    elif judged < config.minimum_judged_sessions:
        short = (
            f"edits kept or reverted in {len(_kept(control))} control and {len(_kept(candidate))} "
            f"candidate sessions, wanted {config.minimum_judged_sessions} each"
        )
    if short:
        return GuardReport(advice=Advice.WAIT, reason=short, measures=())
    measures = [
        _proportion("edit_kept", _kept(control), _kept(candidate), worse="less"),
        # users who say nothing any more must not look like users who keep what they get
        _proportion(
            "edit_judged",
            [seen.kept is not None for seen in control],
            [seen.kept is not None for seen in candidate],
            worse="less",
        ),
        _proportion(
            "dissatisfied",
            [seen.dissatisfied for seen in control],
            [seen.dissatisfied for seen in candidate],
            worse="greater",
        ),
        _latency(control, candidate, config),
    ]
    judged = _holm(measures, config.significance)
    worse = [measure for measure in judged if measure.worse]
    said = "; ".join(
        f"{measure.name} {measure.control:.3g} -> {measure.candidate:.3g} "
        f"(p={measure.p_value:.2g}, "
        f"n={measure.control_count}+{measure.candidate_count})"
        for measure in (worse or judged)
    )
    return GuardReport(
        advice=Advice.ROLL_BACK if worse else Advice.FINE,
        reason=("worse: " if worse else "not worse: ") + said,
        measures=judged,
    )


def _kept(arm: Sequence[ArmObservation]) -> list[bool]:
    return [seen.kept for seen in arm if seen.kept is not None]


def _proportion(
    name: str, control: list[bool], candidate: list[bool], *, worse: Literal["less", "greater"]
) -> ArmMeasure:
    """Fisher's exact test: right at any size, a little cautious at small ones."""
    seen = sum(candidate)
    # the candidate's share of all successes, had they been dealt out blindly
    dealt = scipy.stats.hypergeom(
        len(control) + len(candidate), sum(control) + seen, len(candidate)
    )
    p_value = dealt.cdf(seen) if worse == "less" else dealt.sf(seen - 1)
    if not control and not candidate:  # scipy knows no draw from nothing
        p_value = 1.0
    return ArmMeasure(
        name=name,
        control=mean(control),
        candidate=mean(candidate),
        control_count=len(control),
        candidate_count=len(candidate),
        p_value=float(p_value),
        worse=False,
    )


def _latency(
    control: Sequence[ArmObservation], candidate: Sequence[ArmObservation], config: GuardConfig
) -> ArmMeasure:
    """Rank test on the waiting times. A rise of the median below `latency_growth` gets p = 1."""
    before = np.array(
        [seen.latency_seconds for seen in control if seen.latency_seconds is not None]
    )
    after = np.array(
        [seen.latency_seconds for seen in candidate if seen.latency_seconds is not None]
    )
    p_value, medians = 1.0, (0.0, 0.0)
    if len(before) and len(after):
        medians = (float(np.median(before)), float(np.median(after)))
        if medians[1] > config.latency_growth * medians[0]:
            p_value = float(scipy.stats.mannwhitneyu(after, before, alternative="greater").pvalue)
    return ArmMeasure(
        name="latency_seconds",
        control=medians[0],
        candidate=medians[1],
        control_count=len(before),
        candidate_count=len(after),
        p_value=p_value,
        worse=False,
    )


def _holm(measures: Sequence[ArmMeasure], significance: float) -> tuple[ArmMeasure, ...]:
    """Holm: the smallest p against alpha/m, the next against alpha/(m-1), until one fails."""
    order = sorted(range(len(measures)), key=lambda index: measures[index].p_value)
    judged = list(measures)
    for rank, index in enumerate(order):
        if measures[index].p_value > significance / (len(measures) - rank):
            break
        judged[index] = measures[index].model_copy(update={"worse": True})
    return tuple(judged)
