"""The online guard: waits for evidence, lets equals stay, takes away what users like less."""

import numpy as np
import pytest
from pydantic import ValidationError

from ostinato.infra.platform.ledger.rows import FeedbackRow, InteractionRow
from ostinato.tasks.realtime.config import GuardConfig
from ostinato.tasks.realtime.promotion.guard import (
    Advice,
    compare_arms,
    detectable_difference,
    judge_canary,
)
from ostinato.tasks.realtime.promotion.observations import (
    CANDIDATE,
    CONTROL,
    ArmObservation,
    observe,
    settled,
)
from tests.fakes.interactions import new_interaction

CONFIG = GuardConfig()


def seen(
    arm: str,
    count: int,
    rng: np.random.Generator,
    *,
    kept: float = 0.6,
    dissatisfied: float = 0.2,
    abandoned: float = 0.1,
    survived: float = 0.8,
    latency: float = 5,
    tokens: float = 400,
) -> list[ArmObservation]:
    return [
        ArmObservation(
            arm=arm,
            session_id=f"{arm}-{index}",
            kept=bool(rng.random() < kept),
            survived_10_minutes=bool(rng.random() < survived) if rng.random() < 0.5 else None,
            survived_60_minutes=bool(rng.random() < survived) if rng.random() < 0.5 else None,
            dissatisfied=bool(rng.random() < dissatisfied),
            abandoned=bool(rng.random() < abandoned),
            latency_seconds=float(latency * rng.lognormal(0, 0.4)),
            generated_tokens=float(tokens * rng.lognormal(0, 0.4)),
        )
        for index in range(count)
    ]


def test_too_little_evidence_waits() -> None:
    rng = np.random.default_rng(0)
    report = compare_arms([*seen(CONTROL, 500, rng), *seen(CANDIDATE, 5, rng, kept=0)], CONFIG)
    assert report.advice is Advice.WAIT
    assert report.reason == "500 control and 5 candidate sessions, wanted 20 each"


@pytest.mark.parametrize(
    ("change", "measure"),
    [
        ({"kept": 0.3}, "edit_kept"),
        ({"survived": 0.3}, "edit_survived_10_minutes"),
        ({"survived": 0.3}, "edit_survived_60_minutes"),
        ({"dissatisfied": 0.5}, "dissatisfied"),
        ({"abandoned": 0.4}, "abandoned"),
        ({"latency": 9}, "latency_seconds"),
        ({"tokens": 700}, "generated_tokens"),
    ],
)
def test_each_way_of_being_worse_is_caught(change: dict[str, float], measure: str) -> None:
    rng = np.random.default_rng(1)
    report = compare_arms([*seen(CONTROL, 150, rng), *seen(CANDIDATE, 150, rng, **change)], CONFIG)
    assert report.advice is Advice.ROLL_BACK
    assert measure in [found.name for found in report.measures if found.worse]
    assert report.reason.startswith("worse: ")


def test_better_is_fine() -> None:
    rng = np.random.default_rng(2)
    better = seen(CANDIDATE, 150, rng, kept=0.9, dissatisfied=0.02, latency=2)
    assert compare_arms([*seen(CONTROL, 150, rng), *better], CONFIG).advice is Advice.FINE


def test_slightly_slower_is_not_worse() -> None:
    rng = np.random.default_rng(3)
    slower = seen(CANDIDATE, 3_000, rng, latency=5.5)
    report = compare_arms([*seen(CONTROL, 3_000, rng), *slower], CONFIG)
    assert not next(found for found in report.measures if found.name == "latency_seconds").worse


def test_equal_arms_are_rarely_rolled_back() -> None:
    rng = np.random.default_rng(4)
    reports = [
        compare_arms([*seen(CONTROL, 60, rng), *seen(CANDIDATE, 60, rng)], CONFIG)
        for _ in range(200)
    ]
    assert sum(report.advice is Advice.ROLL_BACK for report in reports) <= 14  # 5 % of 200 is 10


def row(
    *said: tuple[str, float, float], sequence: int = 1, created_at: float = 0.0
) -> InteractionRow:
    """An interaction and what was said of it: signal, value and time."""
    feedback = tuple(
        FeedbackRow(
            feedback_id=str(at), interaction_id="i", signal=name, value=value, created_at=at
        )
        for name, value, at in said
    )
    said_about = {"sequence": sequence, "created_at": created_at, "feedback": feedback}
    return InteractionRow.model_validate(new_interaction("i", "nano").model_dump() | said_about)


def test_revert_after_keep_counts_as_revert() -> None:
    both, kept, silent = observe(
        [
            row(("edit_kept", 1, 0), ("edit_reverted", 1, 1)),
            row(("edit_kept", 1, 0)),
            row(("latency_seconds", 3.0, 0)),
        ]
    )
    assert (both.kept, kept.kept, silent.kept) == (False, True, None)
    assert silent.latency_seconds == 3.0
    assert observe([row(("abandoned", 1, 0))])[0].abandoned


def test_an_edit_is_looked_at_after_10_and_60_minutes() -> None:
    reports = [("edit_survived", value, at) for value, at in ((1, 599), (0.5, 600), (0, 3_599))]
    early, late, none = observe(
        [
            row(*reports),
            row(("edit_survived", 0.4, 9_000), ("edit_survived", 1, 9_001)),
            row(reports[0]),
        ]
    )
    assert (early.survived_10_minutes, early.survived_60_minutes) == (True, None)
    assert (late.survived_10_minutes, late.survived_60_minutes) == (None, False)
    assert (none.survived_10_minutes, none.survived_60_minutes) == (None, None)


def mixed(rng: np.random.Generator, count: int, **worse: float) -> list[ArmObservation]:
    """Both arms in turn, half and half; `worse` is of the candidate."""
    arms = zip(seen(CONTROL, count, rng), seen(CANDIDATE, count, rng, **worse), strict=True)
    return [observation for pair in arms for observation in pair]


QUICK = GuardConfig(looks=3, minimum_seconds=100.0)  # looks at 20, 40 and 80


def test_canary_waits_then_is_promoted_once_it_is_old_enough() -> None:
    told = mixed(np.random.default_rng(0), 100)
    early, young, old = (
        judge_canary(told[:count], QUICK, 0.5, age).advice
        for count, age in ((159, 1e5), (160, 99.0), (160, 100.0))
    )
    assert (early, young, old) == (Advice.WAIT, Advice.WAIT, Advice.PROMOTE)


def test_bad_canary_is_withdrawn_at_the_first_look_that_shows_it() -> None:
    told = mixed(np.random.default_rng(6), 20, kept=0.05)
    assert judge_canary(told[:-2], QUICK, 0.5, 0.0).advice is Advice.WAIT
    assert judge_canary(told, QUICK, 0.5, 0.0).advice is Advice.ROLL_BACK


def test_advice_of_a_look_stays_whatever_comes_after_it() -> None:
    rng = np.random.default_rng(7)
    bad = mixed(rng, 20, kept=0.05)
    assert judge_canary([*bad, *mixed(rng, 500)], QUICK, 0.5, 1e9).advice is Advice.ROLL_BACK


def test_sessions_dealt_out_otherwise_than_asked_end_a_canary() -> None:
    rng = np.random.default_rng(8)
    report = judge_canary(mixed(rng, 100), QUICK, 0.1, 1e9)
    assert report.advice is Advice.ROLL_BACK
    assert report.reason.startswith("sample ratio mismatch: the candidate has 20 of 40 sessions")


def test_interaction_counts_once_it_is_settled_and_again_with_what_is_said_later() -> None:
    kept_twice = row(("edit_kept", 1, 5.0), ("edit_kept", 1, 700.0))
    rows = [kept_twice, row(sequence=2, created_at=500.0), row(sequence=3)]
    (early,) = settled(rows, CONFIG, now=699.0)
    assert [event.created_at for event in early.feedback] == [5.0]
    first, second = settled(rows, CONFIG, now=1_000.0)
    assert first == early
    assert [event.created_at for event in second.feedback] == [5.0, 700.0]


def long_sessions(rng: np.random.Generator, sessions: int) -> list[ArmObservation]:
    """Alike arms in turn. A session's problem is solved or not, and half of them go on about it."""
    told = []
    for index in range(sessions):
        arm = (CONTROL, CANDIDATE)[index % 2]
        kept = bool(rng.random() < 0.6)
        observation = ArmObservation(
            arm=arm, session_id=str(index), kept=kept, dissatisfied=not kept, latency_seconds=5.0
        )
        told += [observation] * (1 if rng.random() < 0.5 else 20)
    return told


def test_a_long_session_counts_once() -> None:
    rng = np.random.default_rng(9)
    config = GuardConfig(looks=3)
    told = [long_sessions(rng, 160) for _ in range(200)]
    withdrawn = sum(judge_canary(one, config, 0.5, 1e9).advice is Advice.ROLL_BACK for one in told)
    assert withdrawn <= 17  # 5 % of 200 is 10, and 17 is its 98 % quantile


def test_candidate_whose_users_fall_silent_is_withdrawn() -> None:
    rng = np.random.default_rng(10)
    silent = [
        seen.model_copy(update={"kept": None}) if seen.arm == CANDIDATE else seen
        for seen in mixed(rng, 80)
    ]
    report = judge_canary(silent, QUICK, 0.5, 1e9)
    assert report.advice is Advice.ROLL_BACK
    assert report.reason.startswith("worse: edit_judged")


def session(index: int, arm: str, *, kept: bool | None) -> ArmObservation:
    return ArmObservation(
        arm=arm, session_id=f"{index}", kept=kept, dissatisfied=False, latency_seconds=None
    )


def in_turn(count: int, *, judged: int, kept_by_candidate: bool = True) -> list[ArmObservation]:
    """Sessions of both arms in turn, of which the first `judged` of each arm are kept or reverted."""
    return [
        session(
            index,
            arm := (CONTROL, CANDIDATE)[index % 2],
            kept=None if index // 2 >= judged else arm == CONTROL or kept_by_candidate,
        )
        for index in range(count)
    ]


AGES = (CONFIG.minimum_seconds, CONFIG.maximum_seconds - 1)


@pytest.mark.parametrize("judged", [0, 1, CONFIG.minimum_judged_sessions - 1])
@pytest.mark.parametrize("age", AGES)
def test_too_few_judged_sessions_promote_nobody(judged: int, age: float) -> None:
    told = in_turn(2_000, judged=judged)
    report = judge_canary(told, CONFIG, 0.5, age)
    assert report.advice is Advice.WAIT
    assert report.reason == (
        f"edits kept or reverted in {judged} control and {judged} candidate sessions, wanted 20 each"
    )
    assert compare_arms(told, CONFIG).advice is Advice.WAIT
    late = judge_canary(told, CONFIG, 0.5, CONFIG.maximum_seconds)
    assert late.advice is Advice.EXPIRE
    assert late.reason == f"undecided after 168.0 h: {report.reason}"


@pytest.mark.parametrize("age", AGES)
def test_the_minimum_of_judged_sessions_promotes(age: float) -> None:
    told = in_turn(2_000, judged=CONFIG.minimum_judged_sessions)
    assert judge_canary(told, CONFIG, 0.5, age).advice is Advice.PROMOTE


def test_judgements_that_come_after_the_last_look_was_due_still_decide() -> None:
    """320 silent sessions of each arm, then users who speak: of a candidate that all of them revert."""
    silent = in_turn(640, judged=0)
    for kept, advice in ((True, Advice.PROMOTE), (False, Advice.ROLL_BACK)):
        spoken = in_turn(40, judged=20, kept_by_candidate=kept)
        spoken = [one.model_copy(update={"session_id": f"s{one.session_id}"}) for one in spoken]
        assert judge_canary([*silent, *spoken], CONFIG, 0.5, 1e5).advice is advice
        assert judge_canary([*silent, *spoken[:-1]], CONFIG, 0.5, 1e5).advice is Advice.WAIT


@pytest.mark.parametrize("silent", [CONTROL, CANDIDATE])
def test_one_arm_whose_users_say_nothing_promotes_nobody(silent: str) -> None:
    told = [
        one.model_copy(update={"kept": None}) if one.arm == silent else one
        for one in in_turn(2_000, judged=1_000)
    ]
    for looks in (1, 5):
        config = GuardConfig(looks=looks)
        assert judge_canary(told, config, 0.5, 1e5).advice is not Advice.PROMOTE
        assert judge_canary(told, config, 0.5, 1e9).advice in (Advice.EXPIRE, Advice.ROLL_BACK)


@pytest.mark.parametrize("measure", ["survived_10_minutes", "survived_60_minutes"])
@pytest.mark.parametrize("silent", [CONTROL, CANDIDATE])
def test_a_measure_that_one_arm_alone_has_promotes_nobody(measure: str, silent: str) -> None:
    """Edits that vanish are reported by no client: without reports of an arm they would count as no difference."""
    told = [
        one.model_copy(update={measure: None if one.arm == silent else True})
        for one in in_turn(2_000, judged=1_000)
    ]
    waiting = judge_canary(told, CONFIG, 0.5, 1e5)
    counts = (1_000, 0) if silent == CANDIDATE else (0, 1_000)
    assert waiting.advice is Advice.WAIT
    assert waiting.reason == (
        f"edit_{measure} in {counts[0]} control and {counts[1]} candidate sessions, wanted 20 each"
    )
    assert judge_canary(told, CONFIG, 0.5, 1e9).advice is Advice.EXPIRE
    rare = [one.model_copy(update={measure: None}) for one in told[38:]]  # nobody has 20
    assert judge_canary([*told[:38], *rare], CONFIG, 0.5, 1e5).advice is Advice.PROMOTE


@pytest.mark.parametrize(("of_candidate", "share"), [(0, 0.2), (0, 0.5), (1, 0.5)])
def test_candidate_that_answers_nobody_is_withdrawn_without_waiting_for_its_last_day(
    of_candidate: int, share: float
) -> None:
    """A request that fails is no interaction: a candidate that fails all of them has no sessions."""
    told = [session(index, CANDIDATE, kept=True) for index in range(of_candidate)]
    told += [session(100 + index, CONTROL, kept=True) for index in range(100)]
    report = judge_canary(told, CONFIG, share, 0.0)
    assert report.advice is Advice.ROLL_BACK
    assert report.reason.startswith("sample ratio mismatch: the candidate has ")
    assert judge_canary([], CONFIG, share, 0.0).advice is Advice.WAIT
    assert judge_canary([], CONFIG, share, 1e9).advice is Advice.EXPIRE


def test_what_is_said_after_the_settle_time_counts_at_later_looks() -> None:
    config = GuardConfig(settle_seconds=0.0, looks=2, minimum_seconds=1.0)
    rows = [
        row(
            ("edit_kept" if index % 2 == 0 else "edit_reverted", 1, 30.0 + index),
            sequence=index + 1,
            created_at=float(index),
        ).model_copy(
            update={
                "arm": (CONTROL, CANDIDATE)[index % 2],
                "session_id": f"s{index}",
                "interaction_id": f"i{index}",
            }
        )
        for index in range(80)
    ]
    told = observe(settled(rows, config, 1_000.0))
    assert len({one.interaction_id for one in told}) == 80
    report = judge_canary(told, config, 0.5, 1e5)
    assert report.advice is Advice.ROLL_BACK
    kept = report.measures[0]
    assert (kept.control, kept.candidate) == (1.0, 0.0)
    # each moment sees what the moments after it see of it
    for now in range(0, 120, 7):
        assert observe(settled(rows, config, now)) == told[: len(settled(rows, config, now))]


def test_minimum_with_which_nothing_can_be_shown_is_refused() -> None:
    """One session of each arm, or two: a candidate that all of them revert would pass."""
    for looks, least in ((1, 5), (5, 6), (12, 7)):
        for judged in range(1, least):
            with pytest.raises(ValidationError, match="is not shown to be worse"):
                GuardConfig(minimum_sessions=1, looks=looks, minimum_judged_sessions=judged)
        config = GuardConfig(minimum_sessions=1, looks=looks, minimum_judged_sessions=least)
        told = in_turn(2 * least + (2 << looks), judged=least, kept_by_candidate=False)
        assert judge_canary(told, config, 0.5, 1e5).advice is Advice.ROLL_BACK
    with pytest.raises(ValidationError, match="wanted more than minimum_seconds"):
        GuardConfig(minimum_seconds=7, maximum_seconds=7)


@pytest.mark.parametrize(
    ("kept", "dissatisfied", "latency"),
    [
        pytest.param((0.6, 0.6), (0.2, 0.2), (5, 5), marks=pytest.mark.nightly),
        ((0.7, 0.4), (0.1, 0.3), (5, 8)),
    ],
)
def test_the_intervals_of_all_looks_hold_the_true_differences(
    kept: tuple[float, float], dissatisfied: tuple[float, float], latency: tuple[float, float]
) -> None:
    """Of 200 canaries with five looks, at most 5 % leave a true difference outside at any look; 18 of 200 happen with
    probability 0.01 at exactly 5 %.
    """
    true = {
        "edit_kept": kept[1] - kept[0],
        "dissatisfied": dissatisfied[1] - dissatisfied[0],
        "latency_seconds": float(latency[1] - latency[0]),  # medians of log-normal latencies
    }
    config = GuardConfig(significance=0.05 / 5)
    misses = dict.fromkeys(true, 0)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        arms = [
            seen(arm, 320, rng, kept=kept[i], dissatisfied=dissatisfied[i], latency=latency[i])
            for i, arm in enumerate((CONTROL, CANDIDATE))
        ]
        missed: set[str] = set()
        for size in (20, 40, 80, 160, 320):
            report = compare_arms([*arms[0][:size], *arms[1][:size]], config)
            for measure in report.measures:
                if measure.name in true:
                    assert measure.difference is not None
                    low, high = measure.difference
                    missed |= set() if low <= true[measure.name] <= high else {measure.name}
        for name in missed:
            misses[name] += 1
    assert max(misses.values()) <= 18, misses


def test_an_interval_of_too_few_values_is_not_told() -> None:
    rng = np.random.default_rng(0)
    config = GuardConfig(minimum_sessions=5, minimum_judged_sessions=5, looks=1)
    few = [*seen(CONTROL, 5, rng), *seen(CANDIDATE, 5, rng)]
    few = [one.model_copy(update={"survived_10_minutes": None}) for one in few]
    report = compare_arms(few, config)
    untold = [measure.name for measure in report.measures if measure.difference is None]
    assert untold == ["latency_seconds", "generated_tokens"]
    assert report.reason.count(" to ") == len(report.measures) - len(untold)
    assert "edit_survived_10_minutes" not in report.reason  # nobody reported it


def test_what_a_canary_can_see_is_what_it_sees() -> None:
    """Of 200 canaries whose users keep fewer edits by the told difference, four fifths are shown worse; the tolerance is
    three standard deviations and the loss of Fisher's exact test.
    """
    config = GuardConfig()
    told = detectable_difference(config)
    caught = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        arms = [*seen(CONTROL, 320, rng, kept=0.5), *seen(CANDIDATE, 320, rng, kept=0.5 - told)]
        look = config.model_copy(update={"significance": config.significance / config.looks})
        caught += compare_arms(arms, look).advice is Advice.ROLL_BACK
    assert 0.68 <= caught / 200 <= 0.89, told
    # to see it in any of eight measures costs one point
    assert round(100 * told) == 15
