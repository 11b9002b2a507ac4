"""The online guard: tests whether users of the candidate arm are worse off.

`observe` makes one observation of each interaction. `compare_arms` makes a one-sided test of each measure (edits
kept, judged, and still there after 10 and 60 minutes; dissatisfied follow-ups; abandoned answers; latency; generated
tokens) with Holm's correction. `judge_canary` makes the sequence of such tests over a canary. Sessions are the unit
of randomisation, so each counts once, however long it is. Nothing is promoted before users have judged enough
sessions of both arms. The guard only advises; serving_line.py changes the champion.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import scipy  # not scipy.stats, which takes a second: it loads when first used
from pydantic import Field

from ostinato.infra.platform.ledger.rows import InteractionRow
from ostinato.infra.serving.gateway.signals import Signal, is_informative
from ostinato.tasks.evaluation.statistics import mean, wilson_interval
from ostinato.tasks.realtime.config import MEASURES, GuardConfig
from ostinato.tasks.records import StageRecord

CONTROL, CANDIDATE = "control", "candidate"
# p-values below which sessions were not assigned by the share, so that arms cannot be compared
_MISMATCH_P = 1e-4  # at a look
_EARLY_MISMATCH_P = 1e-6  # before a look, where it is tested after every session
_MOST_OF_AN_EDIT = 0.5  # share of its lines
# measure: field of ArmObservation, and the direction in which the measure is worse
_SHARES: dict[str, tuple[str, Literal["less", "greater"]]] = {
    "edit_kept": ("kept", "less"),
    # users who stop giving feedback must not count as users who keep their edits
    "edit_judged": ("is_judged", "less"),
    "edit_survived_10_minutes": ("survived_10_minutes", "less"),
    "edit_survived_60_minutes": ("survived_60_minutes", "less"),
    "dissatisfied": ("dissatisfied", "greater"),
    "abandoned": ("abandoned", "greater"),
}
# measure, which is worse when its median is greater: setting with the factor below which a rise never counts
_MEDIANS = {"latency_seconds": "latency_growth", "generated_tokens": "token_growth"}


class ArmObservation(StageRecord):
    """Feedback on one interaction, or on a whole session, of an arm."""

    arm: str
    session_id: str
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


class Advice(StrEnum):
    """Advice of the guard."""

    WAIT = "wait"  # too few sessions
    FINE = "fine"  # no measure is significantly worse
    PROMOTE = "promote"  # fine at every look including the last
    ROLL_BACK = "roll_back"  # users of the candidate are worse off
    EXPIRE = "expire"  # too few sessions or judgements within the canary's maximum age


class ArmMeasure(StageRecord):
    """One measure on both arms."""

    name: str
    control: float
    candidate: float
    control_count: int
    candidate_count: int
    difference: tuple[float, float] | None
    """interval of candidate - control, which holds at all looks of a canary with probability 1 - significance;
    None: too few values"""
    p_value: float
    """probability of a difference at least this bad if the arms were equal (one-sided)"""
    worse: bool = Field(description="whether it is significantly worse after Holm's correction")


class GuardReport(StageRecord):
    """A comparison of the arms, with its advice."""

    advice: Advice
    reason: str
    measures: tuple[ArmMeasure, ...]


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


def judge_canary(
    observations: Sequence[ArmObservation], config: GuardConfig, share: float, age_seconds: float
) -> GuardReport:
    """Advice on an open canary from its observations, in order.

    The arms are compared at sizes fixed in advance, each with an equal part of the significance, so
    that frequent calls do not raise the probability of a false alarm. A canary that still waits at its
    maximum age expires.
    """
    for look in range(config.looks):
        seen, report = _look_at(observations, config, look)
        if report.advice is Advice.WAIT:
            return _report_waiting(observations, report, config, share, age_seconds)
        mismatch = _find_mismatch(seen, share)
        if mismatch:
            return GuardReport(advice=Advice.ROLL_BACK, reason=mismatch, measures=report.measures)
        if report.advice is Advice.ROLL_BACK or look == config.looks - 1:
            break
    if report.advice is Advice.ROLL_BACK:
        return report
    is_old = age_seconds >= config.minimum_seconds
    return report.model_copy(update={"advice": Advice.PROMOTE if is_old else Advice.WAIT})


def _report_waiting(
    observations: Sequence[ArmObservation],
    report: GuardReport,
    config: GuardConfig,
    share: float,
    age_seconds: float,
) -> GuardReport:
    """The report of a look that is not due, or the reason why the canary ends before it."""
    mismatch = _find_mismatch(observations, share, _EARLY_MISMATCH_P)
    if mismatch:
        return report.model_copy(update={"advice": Advice.ROLL_BACK, "reason": mismatch})
    if age_seconds < config.maximum_seconds:
        return report
    reason = f"undecided after {age_seconds / 3_600:.1f} h: {report.reason}"
    return report.model_copy(update={"advice": Advice.EXPIRE, "reason": reason})


def last_look(
    observations: Sequence[ArmObservation], config: GuardConfig
) -> tuple[int, GuardReport | None]:
    """Number of looks for which both arms have enough sessions, and the report of the last of them."""
    found = None
    for look in range(config.looks):
        _, report = _look_at(observations, config, look)
        if report.advice is Advice.WAIT:
            return look, found
        found = report
    return config.looks, found


def detectable_difference(config: GuardConfig, power: float = 0.8) -> float:
    """Worsening of a share of sessions, from 0.5, that the last look shows with this probability if every session counts.
    From the normal approximation (Fleiss, Statistical Methods for Rates and Proportions, 2003, section 4.2); 1 is the
    most.
    """
    size = config.minimum_sessions << (config.looks - 1)
    quantile = statistics.NormalDist().inv_cdf
    distance = quantile(1 - config.significance / config.looks / MEASURES) + quantile(power)
    return min(1.0, distance * math.sqrt(0.5 / size))


def _look_at(
    observations: Sequence[ArmObservation], config: GuardConfig, look: int
) -> tuple[list[ArmObservation], GuardReport]:
    """The observations that a look uses, and its report."""
    wanted = config.model_copy(
        update={
            "significance": config.significance / config.looks,
            "minimum_sessions": config.minimum_sessions << look,
            # only a promotion needs judged sessions; a bad candidate is withdrawn without them
            "minimum_judged_sessions": (
                config.minimum_judged_sessions if look == config.looks - 1 else 0
            ),
        }
    )
    seen = _first_sufficient(observations, wanted)
    return seen, compare_arms(seen, wanted)


def _first_sufficient(
    observations: Sequence[ArmObservation], config: GuardConfig
) -> list[ArmObservation]:
    """The shortest prefix of the observations in which both arms have enough sessions and judged sessions."""
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
    """One observation for each session of the arm: majorities of its interactions, and medians of what has a value."""
    sessions: defaultdict[str, dict[str, ArmObservation]] = defaultdict(dict)
    for number, seen in enumerate(observations):
        if seen.arm == arm:
            sessions[seen.session_id][seen.interaction_id or str(number)] = seen
    return [_summarise(tuple(session.values())) for session in sessions.values()]


def _summarise(session: Sequence[ArmObservation]) -> ArmObservation:
    if len(session) == 1:
        return session[0]
    summary: dict[str, bool | float | None] = {}
    for field, worse in _SHARES.values():
        if field in ArmObservation.model_fields:
            values = _values(session, field)
            most = sum(values) + (
                0.5 if worse == "greater" else 0
            )  # of equal halves the bad one counts
            summary[field] = 2 * most > len(values) if values else None
    for field in _MEDIANS:
        values = _values(session, field)
        summary[field] = statistics.median(values) if values else None
    return session[0].model_copy(update=summary)


def _find_mismatch(
    observations: Sequence[ArmObservation], share: float, significance: float = _MISMATCH_P
) -> str:
    """Reason why sessions were not assigned by the share (binomial test). Empty: no evidence against it."""
    sessions = {(seen.arm, seen.session_id) for seen in observations}
    num_candidate = sum(arm == CANDIDATE for arm, _ in sessions)
    if not sessions:
        return ""
    p_value = scipy.stats.binomtest(num_candidate, len(sessions), share).pvalue
    if p_value >= significance:
        return ""
    return (
        f"sample ratio mismatch: the candidate has {num_candidate} of {len(sessions)} sessions, "
        f"wanted a share of {share:g} (p={p_value:.2g})"
    )


def compare_arms(observations: Sequence[ArmObservation], config: GuardConfig) -> GuardReport:
    """Compares the sessions of the candidate arm with those of control."""
    control = _sessions_of(observations, CONTROL)
    candidate = _sessions_of(observations, CANDIDATE)
    num_judged = min(len(_kept(control)), len(_kept(candidate)))
    missing = ""
    if min(len(control), len(candidate)) < config.minimum_sessions:
        missing = (
            f"{len(control)} control and {len(candidate)} candidate sessions, "
            f"wanted {config.minimum_sessions} each"
        )
    elif num_judged < config.minimum_judged_sessions:
        missing = (
            f"edits kept or reverted in {len(_kept(control))} control and {len(_kept(candidate))} "
            f"candidate sessions, wanted {config.minimum_judged_sessions} each"
        )
    if missing:
        return GuardReport(advice=Advice.WAIT, reason=missing, measures=())
    measures = [
        *(
            _proportion(
                name, _values(control, field), _values(candidate, field), config, worse=worse
            )
            for name, (field, worse) in _SHARES.items()
        ),
        *(
            _median(
                name,
                _values(control, name),
                _values(candidate, name),
                config,
                getattr(config, growth),
            )
            for name, growth in _MEDIANS.items()
        ),
    ]
    told = [measure for measure in measures if measure.control_count or measure.candidate_count]
    corrected = _holm(told, config.significance)
    worse = [measure for measure in corrected if measure.worse]
    figures = "; ".join(_describe(measure) for measure in (worse or corrected))
    return GuardReport(
        advice=Advice.ROLL_BACK if worse else Advice.FINE,
        reason=("worse: " if worse else "not worse: ") + figures,
        measures=corrected,
    )


def _describe(measure: ArmMeasure) -> str:
    interval = measure.difference
    change = "" if interval is None else f"by {interval[0]:+.2g} to {interval[1]:+.2g}, "
    return (
        f"{measure.name} {measure.control:.3g} -> {measure.candidate:.3g} ({change}"
        f"p={measure.p_value:.2g}, n={measure.control_count}+{measure.candidate_count})"
    )


def _kept(arm: Sequence[ArmObservation]) -> list[bool]:
    return [seen.kept for seen in arm if seen.kept is not None]


def _values(arm: Sequence[ArmObservation], name: str) -> list[float]:
    return [value for seen in arm if (value := getattr(seen, name)) is not None]


def _proportion(
    name: str,
    control: list[float],
    candidate: list[float],
    config: GuardConfig,
    *,
    worse: Literal["less", "greater"],
) -> ArmMeasure:
    """Fisher's exact test: valid at any size, slightly conservative at small ones. The interval is made of Wilson's."""
    successes = int(sum(candidate))
    # the candidate's number of successes if they were assigned to arms at random
    random = scipy.stats.hypergeom(
        len(control) + len(candidate), int(sum(control)) + successes, len(candidate)
    )
    p_value = random.cdf(successes) if worse == "less" else random.sf(successes - 1)
    if not control and not candidate:  # scipy returns no number for two empty arms
        p_value = 1.0
    estimates = (_share_of(arm, config.significance) for arm in (control, candidate))
    return ArmMeasure(
        name=name,
        control=mean(control),
        candidate=mean(candidate),
        control_count=len(control),
        candidate_count=len(candidate),
        difference=_difference(*estimates),
        p_value=float(p_value),
        worse=False,
    )


def _median(
    name: str, control: list[float], candidate: list[float], config: GuardConfig, growth: float
) -> ArmMeasure:
    """Rank test of values. A rise of the median below the factor `growth` gets p = 1."""
    p_value, medians, interval = 1.0, (0.0, 0.0), None
    if control and candidate:
        estimates = [_median_of(arm, config.significance) for arm in (control, candidate)]
        medians = (estimates[0][0], estimates[1][0])
        interval = _difference(*estimates)
        if medians[1] > growth * medians[0]:
            test = scipy.stats.mannwhitneyu(candidate, control, alternative="greater")
            p_value = float(test.pvalue)
    return ArmMeasure(
        name=name,
        control=medians[0],
        candidate=medians[1],
        control_count=len(control),
        candidate_count=len(candidate),
        difference=interval,
        p_value=p_value,
        worse=False,
    )


def _share_of(successes: list[float], significance: float) -> tuple[float, float, float]:
    """A proportion with both ends of its interval. Without trials every proportion is possible."""
    if not successes:
        return 0.5, 0.0, 1.0
    share = mean(successes)
    return share, *wilson_interval(share, len(successes), confidence=1 - significance)


def _median_of(values: list[float], significance: float) -> tuple[float, float, float]:
    """A median with both ends of its interval, which are order statistics (Conover, Practical Nonparametric
    Statistics, 1999, section 3.2). They are infinite where there are too few values.
    """
    ordered = [-math.inf, *sorted(values), math.inf]
    rank = int(scipy.stats.binom.ppf(significance / 2, len(values), 0.5))
    return statistics.median(values), ordered[rank], ordered[-1 - rank]


def _difference(
    before: tuple[float, float, float], after: tuple[float, float, float]
) -> tuple[float, float] | None:
    """Interval of the difference of two independent estimates (value, low, high), from their own (Newcombe, Statistics
    in Medicine 17, 1998, method 10). None if it is infinite.
    """
    difference = after[0] - before[0]
    low = difference - math.hypot(after[0] - after[1], before[2] - before[0])
    high = difference + math.hypot(after[2] - after[0], before[0] - before[1])
    return (low, high) if math.isfinite(high - low) else None


def _holm(measures: Sequence[ArmMeasure], significance: float) -> tuple[ArmMeasure, ...]:
    """Holm's correction for `MEASURES` tests, also where some measures have no values: compares the smallest p with alpha/m,
    the next with alpha/(m-1), until one fails.
    """
    order = sorted(range(len(measures)), key=lambda index: measures[index].p_value)
    corrected = list(measures)
    for rank, index in enumerate(order):
        if measures[index].p_value > significance / (MEASURES - rank):
            break
        corrected[index] = measures[index].model_copy(update={"worse": True})
    return tuple(corrected)
