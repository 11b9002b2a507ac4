"""The online guard: tests whether users of the candidate arm are worse off.

`compare_arms` makes a one-sided test of each measure (edits kept, judged, and still there after 10 and 60 minutes;
dissatisfied follow-ups; abandoned answers; latency; generated tokens) with Holm's correction, within groups of users who
behaved alike before. `judge_canary` makes the sequence of such tests over a canary. Sessions are the unit of
randomisation, so each counts once, however long it is. Nothing is promoted before users have judged enough sessions of
both arms. The guard only advises; serving_line.py changes the champion.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from enum import StrEnum

import numpy as np
import scipy  # not scipy.stats, which takes a second: it loads when first used

from ostinato.tasks.realtime.config import MEASURES, GuardConfig
from ostinato.tasks.realtime.promotion.arm_measures import (
    ArmMeasure,
    ArmValues,
    compare_medians,
    compare_shares,
    correct_by_holm,
)
from ostinato.tasks.realtime.promotion.observations import (
    CANDIDATE,
    CONTROL,
    MEDIANS,
    REPORTED,
    SHARES,
    ArmObservation,
    sessions_of,
)
from ostinato.tasks.realtime.promotion.user_groups import UserGroups
from ostinato.tasks.records import StageRecord

# p-values below which sessions were not assigned by the share, so that arms cannot be compared
_MISMATCH_P = 1e-4  # at a look
_EARLY_MISMATCH_P = 1e-6  # before a look, where it is tested after every session
_NO_GROUPS = UserGroups()


class Advice(StrEnum):
    """Advice of the guard."""

    WAIT = "wait"  # too few sessions
    FINE = "fine"  # no measure is significantly worse
    PROMOTE = "promote"  # fine at every look including the last
    ROLL_BACK = "roll_back"  # users of the candidate are worse off
    EXPIRE = "expire"  # too few sessions or judgements within the canary's maximum age


class GuardReport(StageRecord):
    """A comparison of the arms, with its advice."""

    advice: Advice
    reason: str
    measures: tuple[ArmMeasure, ...]


def judge_canary(
    observations: Sequence[ArmObservation],
    config: GuardConfig,
    share: float,
    age_seconds: float,
    *,
    groups: UserGroups = _NO_GROUPS,
) -> GuardReport:
    """Advice on an open canary from its observations, in order. `groups`: of its users, by what they did before it.

    The arms are compared at sizes fixed in advance, each with an equal part of the significance, so
    that frequent calls do not raise the probability of a false alarm. A canary that still waits at its
    maximum age expires.
    """
    for look in range(config.looks):
        seen, report = _look_at(observations, config, look, groups)
        if report.advice is Advice.WAIT:
            mismatch = find_mismatch(observations, share, groups, _EARLY_MISMATCH_P)
            return _report_waiting(report, config, mismatch, age_seconds)
        mismatch = find_mismatch(seen, share, groups)
        if mismatch:
            return GuardReport(advice=Advice.ROLL_BACK, reason=mismatch, measures=report.measures)
        if report.advice is Advice.ROLL_BACK or look == config.looks - 1:
            break
    if report.advice is Advice.ROLL_BACK:
        return report
    is_old = age_seconds >= config.minimum_seconds
    return report.model_copy(update={"advice": Advice.PROMOTE if is_old else Advice.WAIT})


def _report_waiting(
    report: GuardReport, config: GuardConfig, mismatch: str, age_seconds: float
) -> GuardReport:
    """The report of a look that is not due, or the reason why the canary ends before it."""
    if mismatch:
        return report.model_copy(update={"advice": Advice.ROLL_BACK, "reason": mismatch})
    if age_seconds < config.maximum_seconds:
        return report
    reason = f"undecided after {age_seconds / 3_600:.1f} h: {report.reason}"
    return report.model_copy(update={"advice": Advice.EXPIRE, "reason": reason})


def last_look(
    observations: Sequence[ArmObservation], config: GuardConfig, groups: UserGroups = _NO_GROUPS
) -> tuple[int, GuardReport | None]:
    """Number of looks for which both arms have enough sessions, and the report of the last of them."""
    found = None
    for look in range(config.looks):
        _, report = _look_at(observations, config, look, groups)
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


def describe_power(config: GuardConfig) -> str:
    """Phrase about the worsening that the last look shows."""
    least = max(0.0, 50 - 100 * detectable_difference(config))
    return f"a fall from 50 % to {least:.0f} % of all sessions with probability 0.8"


def _look_at(
    observations: Sequence[ArmObservation], config: GuardConfig, look: int, groups: UserGroups
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
    return seen, compare_arms(seen, wanted, groups)


def _first_sufficient(
    observations: Sequence[ArmObservation], config: GuardConfig
) -> list[ArmObservation]:
    """The shortest prefix of the observations in which both arms have enough sessions and judged sessions."""
    sessions: dict[str, set[str]] = {CONTROL: set(), CANDIDATE: set()}
    reported = {name: {CONTROL: set[str](), CANDIDATE: set[str]()} for name in REPORTED}
    for number, seen in enumerate(observations):
        if not _find_missing(sessions, reported, config):
            return list(observations[:number])
        sessions[seen.arm].add(seen.session_id)
        for name, field in REPORTED.items():
            if getattr(seen, field) is not None:
                reported[name][seen.arm].add(seen.session_id)
    return list(observations)


def _find_missing(
    sessions: Mapping[str, Sized], reported: Mapping[str, Mapping[str, Sized]], config: GuardConfig
) -> str:
    """Why arms cannot be compared yet. Of the measures that not every client reports, both arms need enough sessions once
    one arm has: an arm that falls silent must not pass for one that is as good. Empty: they can be compared.
    """
    control, candidate = len(sessions[CONTROL]), len(sessions[CANDIDATE])
    wanted, what = config.minimum_sessions, ""
    if min(control, candidate) >= wanted:
        wanted = config.minimum_judged_sessions
        for name, found in reported.items():
            control, candidate = len(found[CONTROL]), len(found[CANDIDATE])
            if min(control, candidate) < wanted and (
                name == "edit_kept" or max(control, candidate) >= wanted
            ):
                what = "edits kept or reverted in " if name == "edit_kept" else f"{name} in "
                break
        else:
            return ""
    return f"{what}{control} control and {candidate} candidate sessions, wanted {wanted} each"


def find_mismatch(
    observations: Sequence[ArmObservation],
    share: float,
    groups: UserGroups = _NO_GROUPS,
    significance: float = _MISMATCH_P,
) -> str:
    """Reason why sessions were not assigned by the share (binomial test), all of them or those of a group of users: a
    client that chooses its sessions' arm by what it did before could else shift the comparison. Empty: no evidence.
    """
    sessions = {(seen.arm, seen.session_id): seen.user for seen in observations}
    found = {"": (sum(arm == CANDIDATE for arm, _ in sessions), len(sessions))}
    of_users = Counter((user, arm) for (arm, _), user in sessions.items())
    for measure in groups.measures:
        group_of, counts = groups.of(measure), Counter[tuple[int, str]]()
        for (user, arm), number in of_users.items():
            counts[group_of.get(user, 0), arm] += number
        for group in {group for group, _ in counts}:
            num_candidate = counts[group, CANDIDATE]
            of = f" of users in group {group} by {measure}"
            found[of] = (num_candidate, num_candidate + counts[group, CONTROL])
    successes, trials = np.array(list(found.values())).T
    binomial = scipy.stats.binom(trials, share)
    p_values = 2 * np.minimum(binomial.cdf(successes), binomial.sf(successes - 1))
    p_values[1:] *= max(1, len(found) - 1)  # Bonferroni's correction
    for (name, (num_candidate, num_sessions)), p_value in zip(found.items(), p_values, strict=True):
        if p_value < significance:
            return (
                f"sample ratio mismatch: the candidate has {num_candidate} of {num_sessions} sessions"
                f"{name}, wanted a share of {share:g} (p={p_value:.2g})"
            )
    return ""


def compare_arms(
    observations: Sequence[ArmObservation], config: GuardConfig, groups: UserGroups = _NO_GROUPS
) -> GuardReport:
    """Compares the sessions of the candidate arm with those of control."""
    arms = {
        name: sessions_of([seen for seen in observations if seen.arm == name])
        for name in (CONTROL, CANDIDATE)
    }
    reported = {
        name: {arm: _having(sessions, field) for arm, sessions in arms.items()}
        for name, field in REPORTED.items()
    }
    missing = _find_missing(arms, reported, config)
    if missing:
        return GuardReport(advice=Advice.WAIT, reason=missing, measures=())
    measures = [
        compare_shares(name, _values(arms, name, groups), config.significance, worse=worse)
        for name, (_, worse) in SHARES.items()
    ]
    for name, setting in MEDIANS.items():
        values, growth = _values(arms, name, groups), getattr(config, setting)
        measures.append(compare_medians(name, values, config.significance, growth=growth))
    present = [measure for measure in measures if measure.control_count or measure.candidate_count]
    corrected = correct_by_holm(present, config.significance)
    worse = [measure for measure in corrected if measure.worse]
    figures = "; ".join(_describe(measure) for measure in (worse or corrected))
    if any(measure.num_groups > 1 for measure in measures):
        figures += "; users are compared with users who behaved alike before the canary"
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


def _having(sessions: Sequence[ArmObservation], field: str) -> list[ArmObservation]:
    return [seen for seen in sessions if getattr(seen, field) is not None]


def _values(
    arms: Mapping[str, Sequence[ArmObservation]], measure: str, groups: UserGroups
) -> list[ArmValues]:
    field, group_of = SHARES.get(measure, (measure,))[0], groups.of(measure)
    return [
        ArmValues(
            np.array([getattr(seen, field) for seen in sessions], dtype=float),
            np.array([group_of.get(seen.user, 0) for seen in sessions], dtype=int),
        )
        for sessions in (_having(arms[name], field) for name in (CONTROL, CANDIDATE))
    ]
