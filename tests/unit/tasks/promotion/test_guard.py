"""The online guard: waits for evidence, lets equals stay, takes away what users like less."""

import numpy as np
import pytest

from ostinato.infra.platform.ledger.rows import FeedbackRow, InteractionRow
from ostinato.tasks.promotion.config import GuardConfig
from ostinato.tasks.promotion.guard import (
    CANDIDATE,
    CONTROL,
    Advice,
    Observation,
    compare_arms,
    judge_canary,
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
    latency: float = 5,
) -> list[Observation]:
    return [
        Observation(
            arm=arm,
            session_id=f"{arm}-{index}",
            kept=bool(rng.random() < kept),
            dissatisfied=bool(rng.random() < dissatisfied),
            latency_seconds=float(latency * rng.lognormal(0, 0.4)),
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
        ({"dissatisfied": 0.5}, "dissatisfied"),
        ({"latency": 9}, "latency_seconds"),
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
    assert observe([row(("abandoned", 1, 0))])[0].dissatisfied


def mixed(rng: np.random.Generator, count: int, **worse: float) -> list[Observation]:
    """Both arms in turn, half and half; `worse` is of the candidate."""
    arms = zip(seen(CONTROL, count, rng), seen(CANDIDATE, count, rng, **worse), strict=True)
    return [observation for pair in arms for observation in pair]


QUICK = GuardConfig(looks=3, minimum_seconds=100.0)  # looks at 20, 40 and 80


def test_canary_waits_then_is_promoted_once_it_is_old_enough() -> None:
    told = mixed(np.random.default_rng(5), 100)
    early, young, old = (
        judge_canary(told[:count], QUICK, 0.5, age).advice
        for count, age in ((159, 1e9), (160, 99.0), (160, 100.0))
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


def test_interaction_counts_once_it_is_settled_with_what_was_said_until_then() -> None:
    kept_twice = row(("edit_kept", 1, 5.0), ("edit_kept", 1, 700.0))
    rows = [kept_twice, row(sequence=2, created_at=500.0), row(sequence=3)]
    (only,) = settled(rows, CONFIG, now=1_000.0)
    assert [event.created_at for event in only.feedback] == [5.0]


def long_sessions(rng: np.random.Generator, sessions: int) -> list[Observation]:
    """Alike arms in turn. A session's problem is solved or not, and half of them go on about it."""
    told = []
    for index in range(sessions):
        arm = (CONTROL, CANDIDATE)[index % 2]
        kept = bool(rng.random() < 0.6)
        observation = Observation(
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


def test_users_who_say_nothing_about_either_arm_take_nobody_away() -> None:
    silent = [
        Observation(
            arm=(CONTROL, CANDIDATE)[index % 2],
            session_id=f"{index}",
            kept=None,
            dissatisfied=False,
            latency_seconds=None,
        )
        for index in range(400)
    ]
    assert compare_arms(silent, CONFIG).advice is Advice.FINE
    assert judge_canary(silent, CONFIG, 0.5, CONFIG.minimum_seconds).advice is not Advice.ROLL_BACK
