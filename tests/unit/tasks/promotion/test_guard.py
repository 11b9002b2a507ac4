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
    observe,
)

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
            kept=bool(rng.random() < kept),
            dissatisfied=bool(rng.random() < dissatisfied),
            latency_seconds=float(latency * rng.lognormal(0, 0.4)),
        )
        for _ in range(count)
    ]


def test_too_little_evidence_waits() -> None:
    rng = np.random.default_rng(0)
    report = compare_arms([*seen(CONTROL, 500, rng), *seen(CANDIDATE, 5, rng, kept=0)], CONFIG)
    assert report.advice is Advice.WAIT
    assert report.reason == "500 control and 5 candidate interactions, wanted 20 each"


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


def test_revert_after_keep_counts_as_revert() -> None:
    def row(*signals: tuple[str, float]) -> InteractionRow:
        feedback = tuple(
            FeedbackRow(
                feedback_id=str(at), interaction_id="i", signal=name, value=value, created_at=at
            )
            for at, (name, value) in enumerate(signals)
        )
        return InteractionRow(
            sequence=1,
            interaction_id="i",
            line="nano",
            tenant="t",
            session_id="s",
            arm=CONTROL,
            checkpoint_id="checkpoint/nano@1",
            weight_version=1,
            problem_kind="k",
            consent=True,
            object_key="o",
            created_at=0,
            feedback=feedback,
        )

    both, kept, silent = observe(
        [
            row(("edit_kept", 1), ("edit_reverted", 1)),
            row(("edit_kept", 1)),
            row(("latency_seconds", 3.0)),
        ]
    )
    assert (both.kept, kept.kept, silent.kept) == (False, True, None)
    assert silent.latency_seconds == 3.0
    assert observe([row(("abandoned", 1))])[0].dissatisfied
