"""Measures of both arms of a canary: their difference, its interval, and a one-sided test of whether it is worse.

Arms are compared within groups of alike users (user_groups.py). With one group these are Fisher's exact test with
Newcombe's interval for shares, and the Mann-Whitney test with order statistics for medians.

Shapes: S sessions of an arm, G groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy  # not scipy.stats, which takes a second: it loads when first used
from pydantic import Field

from ostinato.tasks.evaluation.statistics import wilson_interval
from ostinato.tasks.realtime.config import MEASURES
from ostinato.tasks.records import StageRecord

_MOST_GAIN = (
    4.0  # sessions that a session counts for at most, however alike the users of a group seem
)


class ArmMeasure(StageRecord):
    """One measure on both arms, weighted so that both have the same mix of user groups."""

    name: str
    control: float
    candidate: float
    control_count: int
    candidate_count: int
    num_groups: int = Field(
        description="groups of alike users in which both arms have sessions; 1: the arms are compared as a whole"
    )
    difference: tuple[float, float] | None
    """interval of candidate - control, which holds at all looks of a canary with probability 1 - significance;
    None: too few values"""
    p_value: float
    """probability of a difference at least this bad if the arms were equal (one-sided)"""
    worse: bool = Field(description="whether it is significantly worse after Holm's correction")


@dataclass(frozen=True, slots=True)
class ArmValues:
    """Values of one measure in the sessions of an arm, and the group of each session's user."""

    values_S: np.ndarray
    groups_S: np.ndarray


_Arms = Sequence[ArmValues]  # control, candidate
_Estimate = tuple[float, float, float]  # with both ends of its interval


def compare_shares(
    name: str, arms: _Arms, significance: float, *, worse: Literal["less", "greater"]
) -> ArmMeasure:
    """Compares shares of sessions. Values are 0 or 1."""
    estimates = [
        _share_of(arm, weights_S, significance)
        for arm, weights_S in zip(arms, _weights(arms), strict=True)
    ]
    return _measure(name, arms, estimates, _exact_p_value(arms, worse))


def compare_medians(name: str, arms: _Arms, significance: float, *, growth: float) -> ArmMeasure:
    """Compares medians. A rise of the median below the factor `growth` gets p = 1."""
    estimates, p_value = [(0.0, -math.inf, math.inf)] * 2, 1.0
    if all(len(arm.values_S) for arm in arms):
        estimates = [
            _median_of(arm, weights_S, significance)
            for arm, weights_S in zip(arms, _weights(arms), strict=True)
        ]
        if estimates[1][0] > growth * estimates[0][0]:
            control, candidate = _aligned(arms)
            test = scipy.stats.mannwhitneyu(candidate, control, alternative="greater")
            p_value = float(test.pvalue)
    return _measure(name, arms, estimates, p_value)


def _measure(name: str, arms: _Arms, estimates: Sequence[_Estimate], p_value: float) -> ArmMeasure:
    sizes = [len(arm.values_S) for arm in arms]
    values = [estimate[0] if size else 0.0 for estimate, size in zip(estimates, sizes, strict=True)]
    return ArmMeasure(
        name=name,
        control=values[0],
        candidate=values[1],
        control_count=sizes[0],
        candidate_count=sizes[1],
        num_groups=max(1, int((_counts(arms) > 0).all(axis=0).sum())),
        difference=_difference(*estimates),
        p_value=p_value,
        worse=False,
    )


def _counts(arms: _Arms) -> np.ndarray:
    """Sessions of both arms by group: 2 x G."""
    num_groups = 1 + max(int(arm.groups_S.max(initial=0)) for arm in arms)
    return np.array([np.bincount(arm.groups_S, minlength=num_groups) for arm in arms])


def _weights(arms: _Arms) -> list[np.ndarray]:
    """Weights of each arm's sessions, of sum 1, that give both arms the same mix of groups: that of Mantel and
    Haenszel, which leaves out a group that one arm lacks. They depend on nothing that a user did in the canary.
    """
    counts_AG = _counts(arms)
    mix_G = counts_AG.prod(axis=0) / np.maximum(1, counts_AG.sum(axis=0))
    if not mix_G.any():
        return [np.full(len(arm.values_S), 1 / max(1, len(arm.values_S))) for arm in arms]
    weights_AG = mix_G / mix_G.sum() / np.maximum(1, counts_AG)
    return [weights_G[arm.groups_S] for arm, weights_G in zip(arms, weights_AG, strict=True)]


def _effective_sessions(
    successes_S: np.ndarray, groups_S: np.ndarray, weights_S: np.ndarray
) -> float:
    """Number of sessions of arbitrary users whose share would be as precise as the weighted one, from the variance
    within groups. With one group it is the number of sessions.
    """
    used_S = weights_S > 0
    successes_S, groups_S, weights_S = successes_S[used_S], groups_S[used_S], weights_S[used_S]
    counts_G = np.bincount(groups_S)
    rates_G = np.bincount(groups_S, successes_S) / np.maximum(1, counts_G)
    size, num_groups = len(successes_S), np.count_nonzero(counts_G)
    inside = float((counts_G * rates_G * (1 - rates_G)).sum()) / max(1, size - num_groups)
    squares = float((weights_S**2).sum())
    share = float(weights_S @ successes_S)
    wanted, found = share * (1 - share), inside * (size - 1) / size
    return (
        1.0 if wanted <= 0 else min(_MOST_GAIN, wanted / found if found else math.inf)
    ) / squares


def _share_of(arm: ArmValues, weights_S: np.ndarray, significance: float) -> _Estimate:
    """A share with Wilson's interval. Without trials every share is possible."""
    if not len(arm.values_S):
        return 0.5, 0.0, 1.0
    share = min(1.0, float(weights_S @ arm.values_S))
    size = _effective_sessions(arm.values_S, arm.groups_S, weights_S)
    return share, *wilson_interval(share, size, confidence=1 - significance)


def _median_of(arm: ArmValues, weights_S: np.ndarray, significance: float) -> _Estimate:
    """A weighted median with the order statistics that bound it (Conover, Practical Nonparametric Statistics, 1999,
    section 3.2; with weights Woodruff, JASA 47, 1952). They are infinite where there are too few values.
    """
    order = np.argsort(arm.values_S, kind="stable")
    values, weights = arm.values_S[order], weights_S[order]

    def lowest(level: float) -> float:
        return float(values[np.searchsorted(np.cumsum(weights), level - 1e-9)])

    def highest(level: float) -> float:
        return float(values[::-1][np.searchsorted(np.cumsum(weights[::-1]), level - 1e-9)])

    median = (lowest(0.5) + highest(0.5)) / 2
    below_S = (arm.values_S <= median).astype(float)
    size = int(_effective_sessions(below_S, arm.groups_S, weights_S) + 1e-9)
    rank = int(scipy.stats.binom.ppf(significance / 2, size, 0.5))
    if rank < 1:
        return median, -math.inf, math.inf
    return median, lowest(rank / size), highest(rank / size)


def _exact_p_value(arms: _Arms, worse: Literal["less", "greater"]) -> float:
    """Fisher's exact test within groups (Mehta, Patel and Gray, JASA 80, 1985): the probability of at most, or at least,
    the candidate's successes if each group's were assigned to the arms at random. Valid at any size.
    """
    counts_AG = _counts(arms)
    size = counts_AG.shape[1]
    successes_AG = np.array(
        [np.bincount(arm.groups_S, arm.values_S, size).astype(int) for arm in arms]
    )
    random, least = np.ones(1), 0
    for trials_A, successes_A in zip(counts_AG.T, successes_AG.T, strict=True):
        both = int(successes_A.sum())
        low, high = max(0, both - int(trials_A[0])), min(int(trials_A[1]), both)
        if low < high:
            possible = np.arange(low, high + 1)
            chances = scipy.stats.hypergeom.pmf(possible, trials_A.sum(), both, trials_A[1])
            random = np.convolve(random, chances)
        least += low
    place = int(successes_AG[1].sum()) - least
    return min(1.0, float((random[: place + 1] if worse == "less" else random[place:]).sum()))


def _aligned(arms: _Arms) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the values less the median of their group in both arms (Hodges and Lehmann, Ann. Math. Stat. 33,
    1962). A rank test of them is valid, since the medians do not depend on which arm answered whom.
    """
    values = np.log1p(np.concatenate([arm.values_S for arm in arms]))
    groups = np.concatenate([arm.groups_S for arm in arms])
    for group in np.unique(groups):
        values[groups == group] -= np.median(values[groups == group])
    return values[: len(arms[0].values_S)], values[len(arms[0].values_S) :]


def _difference(before: _Estimate, after: _Estimate) -> tuple[float, float] | None:
    """Interval of the difference of two independent estimates, from their own (Newcombe, Statistics in Medicine 17, 1998,
    method 10). None if it is infinite.
    """
    difference = after[0] - before[0]
    low = difference - math.hypot(after[0] - after[1], before[2] - before[0])
    high = difference + math.hypot(after[2] - after[0], before[0] - before[1])
    return (low, high) if math.isfinite(high - low) else None


def correct_by_holm(measures: Sequence[ArmMeasure], significance: float) -> tuple[ArmMeasure, ...]:
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
