"""Arms compared within groups of alike users: the same claims as without groups, from narrower intervals."""

import itertools

import numpy as np
import pytest
from scipy import stats

from ostinato.tasks.realtime.config import GuardConfig
from ostinato.tasks.realtime.promotion.arm_measures import (
    ArmMeasure,
    ArmValues,
    compare_medians,
    compare_shares,
)
from ostinato.tasks.realtime.promotion.guard import (
    Advice,
    compare_arms,
    find_mismatch,
    judge_canary,
)
from ostinato.tasks.realtime.promotion.observations import MEDIANS, SHARES, ArmObservation
from ostinato.tasks.realtime.promotion.user_groups import UserGroups, group_users
from tests.benchmarks.guard_world import Population, Sessions, World

LOOKS = (20, 40, 80, 160, 320)
NOBODY = UserGroups()
ALIKE = "users are compared with users who behaved alike before the canary"


def values(successes: int, trials: int, group: int = 0) -> ArmValues:
    found = np.arange(trials) < successes
    return ArmValues(found.astype(float), np.full(trials, group))


def joined(*arms: ArmValues) -> ArmValues:
    return ArmValues(
        np.concatenate([arm.values_S for arm in arms]),
        np.concatenate([arm.groups_S for arm in arms]),
    )


def measured(
    sessions: Sessions, name: str, groups: UserGroups, significance: float = 0.05 / 5
) -> ArmMeasure:
    arms = sessions.of_arms(name, groups)
    if name in MEDIANS:
        return compare_medians(name, arms, significance, growth=1.25)
    return compare_shares(name, arms, significance, worse=SHARES[name][1])


@pytest.mark.parametrize("group", [0, 3])
@pytest.mark.parametrize(("control", "candidate"), [((70, 80), (9, 20)), ((0, 5), (3, 3))])
def test_one_group_is_fishers_exact_test(
    control: tuple[int, int], candidate: tuple[int, int], group: int
) -> None:
    arms = values(*control, group), values(*candidate, group)
    table = [[of, all_of - of] for of, all_of in (candidate, control)]
    for worse in ("less", "greater"):
        found = compare_shares("edit_kept", arms, 0.05, worse=worse)
        assert found.p_value == pytest.approx(stats.fisher_exact(table, worse)[1])
        assert (found.control, found.candidate) == (
            control[0] / control[1],
            candidate[0] / candidate[1],
        )


def test_p_value_within_groups_is_that_of_all_assignments() -> None:
    """Groups of 5 and of 6 sessions, whose arms are dealt out in every possible way."""
    control = joined(values(3, 3, 1), values(1, 3, 2))
    candidate = joined(values(1, 2, 1), values(0, 3, 2))
    drawn = [
        sum(first) + sum(second)
        for first in itertools.combinations([1, 1, 1, 1, 0], 2)
        for second in itertools.combinations([1, 0, 0, 0, 0, 0], 3)
    ]
    found = compare_shares("edit_kept", (control, candidate), 0.05, worse="less")
    assert found.p_value == pytest.approx(np.mean([total <= 1 for total in drawn]))
    other = compare_shares("abandoned", (control, candidate), 0.05, worse="greater")
    assert other.p_value == pytest.approx(np.mean([total >= 1 for total in drawn]))


def test_arms_that_share_no_group_show_nothing() -> None:
    arms = values(40, 40, 1), values(0, 40, 2)
    assert compare_shares("edit_kept", arms, 0.05, worse="less").p_value == 1.0
    assert (
        compare_shares("edit_kept", (values(0, 0), values(3, 4)), 0.05, worse="less").p_value == 1
    )


@pytest.mark.parametrize(
    "worse", [{}, {"edit_kept": 0.15, "abandoned": 0.1, "latency_seconds": 1.3}]
)
def test_intervals_of_all_looks_hold_the_true_difference(worse: dict[str, float]) -> None:
    """Of 200 canaries with five looks, at most 5 % leave a true difference outside at any look; 18 of 200 happen with
    probability 0.01 at exactly 5 %. One user in five is unknown.
    """
    true = {
        "edit_kept": -worse.get("edit_kept", 0.0),
        "abandoned": worse.get("abandoned", 0.0),
        "latency_seconds": 5.0 * (worse.get("latency_seconds", 1.0) - 1),
    }
    misses, false_alarms = dict.fromkeys(true, 0), 0
    for seed in range(200):
        world = World(Population(worse=worse, share_dealt=0.4), np.random.default_rng(seed))
        sessions = world.sessions(1_000)
        found = {
            name: [measured(sessions.prefix(size), name, world.groups) for size in LOOKS]
            for name in true
        }
        for name, looks in found.items():
            intervals = [one.difference for one in looks if one.difference is not None]
            misses[name] += any(not low <= true[name] <= high for low, high in intervals)
        false_alarms += any(
            one.p_value <= 0.05 / 5 / 3 for looks in found.values() for one in looks
        )
    assert max(misses.values()) <= 18, misses
    if not worse:
        assert false_alarms <= 18


def test_correlated_users_narrow_the_intervals_and_others_widen_them_little() -> None:
    ratios: dict[float, list[float]] = {}
    for alike in (0.57, 0.0):
        for seed in range(30):
            world = World(Population(alike=alike, known=1.0), np.random.default_rng(seed))
            sessions = world.sessions(1_900).prefix(320)
            widths = []
            for groups in (world.groups, NOBODY):
                interval = measured(sessions, "edit_kept", groups).difference
                assert interval is not None
                widths.append(interval[1] - interval[0])
            ratios.setdefault(alike, []).append(widths[0] / widths[1])
    # at a correlation of 0.7 a linear covariate would give 0.71, and four groups lose a seventh of its gain
    assert np.mean(ratios[0.57]) <= 0.8
    assert np.mean(ratios[0.0]) <= 1.02


def test_users_without_earlier_sessions_change_nothing() -> None:
    world = World(Population(known=0.0), np.random.default_rng(0))
    told, config = world.observations(600), GuardConfig()
    assert world.groups.users == {}
    strangers = UserGroups(measures=("edit_kept",), users={"somebody": (1,), "else": (4,)})
    plain = compare_arms(told, config)
    assert compare_arms(told, config, world.groups) == plain
    assert compare_arms(told, config, strangers) == plain
    assert ALIKE not in plain.reason
    some = World(Population(known=0.5), np.random.default_rng(0))
    report = compare_arms(some.observations(600), config, some.groups)
    assert report.reason.endswith(ALIKE)
    assert all(measure.difference is not None for measure in report.measures)


def test_users_are_grouped_by_what_they_did() -> None:
    def session(user: str, index: int, *, kept: bool | None, latency: float) -> ArmObservation:
        return ArmObservation(
            arm="control",
            session_id=f"{user}{index}",
            user=user,
            kept=kept,
            dissatisfied=False,
            latency_seconds=latency,
        )

    told = [
        session(user, index, kept=kept, latency=latency)
        for user, kept, latency in (("a", True, 9.0), ("b", False, 1.0), ("c", None, 3.0))
        for index in range(4)
    ]
    groups = group_users(told)
    kept, latency = groups.of("edit_kept"), groups.of("latency_seconds")
    assert kept["b"] < kept["a"]
    assert kept["c"] == 0, "nobody knows"
    assert latency["b"] < latency["c"] < latency["a"]
    assert len(set(groups.of("dissatisfied").values())) == 1
    assert groups.of("generated_tokens") == dict.fromkeys("abc", 0)
    assert group_users([]).users == {}


@pytest.mark.parametrize("false_past", [0.5, 1.0])
def test_false_feedback_before_a_canary_neither_saves_nor_condemns_a_candidate(
    false_past: float,
) -> None:
    """Who could write the past of users cannot choose their arm, so a test within any groups is as valid, and it is worth
    no less than one without. Of 60 equal candidates 8 are shown worse with probability 0.01 at exactly 5 %.
    """
    config = GuardConfig(looks=1)
    shown: dict[str, int] = {"equal": 0, "worse": 0, "worse, nobody is known": 0}
    for seed in range(60):
        for name, worse in (("equal", 0.0), ("worse", 0.25)):
            population = Population(
                false_past=false_past, worse={"edit_kept": worse}, share_dealt=0.5
            )
            world = World(population, np.random.default_rng(seed))
            told = world.observations(320)
            shown[name] += compare_arms(told, config, world.groups).advice is Advice.ROLL_BACK
            if worse:
                plain = compare_arms(told, config)
                shown["worse, nobody is known"] += plain.advice is Advice.ROLL_BACK
    assert shown["equal"] <= 8
    assert shown["worse"] >= shown["worse, nobody is known"] - 6


def test_clients_that_choose_their_arm_by_their_past_end_a_canary() -> None:
    """Most users take bad histories to the candidate and good ones to control."""
    world = World(
        Population(steering=0.6, share_dealt=0.5, share_asked=0.5), np.random.default_rng(1)
    )
    told = world.observations(900)
    assert find_mismatch(told, 0.5) == ""
    found = find_mismatch(told, 0.5, world.groups)
    assert found.startswith("sample ratio mismatch: the candidate has ")
    assert " sessions of users in group " in found
    report = judge_canary(told, GuardConfig(), 0.5, 1e5, groups=world.groups)
    assert report.advice is Advice.ROLL_BACK


def test_sessions_of_honest_users_are_rarely_taken_for_chosen_ones() -> None:
    """At a look a mismatch of any group has probability 1 in 10,000."""
    for seed in range(40):
        world = World(Population(), np.random.default_rng(seed))
        assert find_mismatch(world.observations(500), 0.2, world.groups) == ""
