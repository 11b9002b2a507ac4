"""Plots of a stage come from its metrics, whichever stage it is, each with what it should look like."""

import json
from pathlib import Path

import pytest

from ostinato.flows.stages import curves
from ostinato.flows.stages.curves import (
    Curve,
    panels,
    plot_png,
    rl_curves,
    show_curves,
    stage_curves,
)
from ostinato.infra.platform.artifacts import ArtifactRef

REF = ArtifactRef(kind="reinforced", name="toy", version=1, fingerprint="f", object_prefix="p")
STEP = {
    "solve_rate": 0.5,
    "reward_mean": 0.4,
    "groups": 10,
    "staleness_mean": 0.2,
    "staleness_max": 1,
    "sampled_tokens_mean": 90.0,
    "sampled_seconds_mean": 3.0,
    "entropy_nats": 0.3,
    "published_bytes": 8_000_000,
    "evaluation_step": 0,
    "evaluation_average": 0.4,
    "evaluation_average_low": 0.3,
    "evaluation_average_high": 0.5,
    "evaluation_best_of": 0.6,
    "evaluation_best_of_low": 0.45,
    "evaluation_best_of_high": 0.75,
}


def curves_of(path: Path, *rows: dict) -> dict[str, Curve]:
    metrics = path / "metrics.jsonl"
    lines = [json.dumps({"step": step, **row}) for step, row in enumerate(rows, 1)]
    metrics.write_text("\n".join(lines) + "\n")
    return {curve.key: curve for curve in stage_curves(metrics)}


def test_rl_has_plots_with_intervals_staleness_and_sizes_of_the_chain(tmp_path: Path) -> None:
    later = {
        **STEP,
        "solve_rate": 1.0,
        "evaluation_step": 2,
        "trained_tokens_mean": 80.0,
        "trained_seconds_mean": 2.5,
    }
    found = curves_of(tmp_path, STEP, later)
    assert found.keys() == {
        "evaluation", "solve-rate", "pacing", "durations", "staleness", "entropy", "weight-chain",
    }  # fmt: skip
    assert found["pacing"].series == {
        "sampled_tokens_mean": ((1.0, 2.0), (90.0, 90.0)),
        "trained_tokens_mean": ((2.0,), (80.0,)),
    }
    assert found["durations"].series == {
        "sampled_seconds_mean": ((1.0, 2.0), (3.0, 3.0)),
        "trained_seconds_mean": ((2.0,), (2.5,)),
    }
    assert all(curve.expected.endswith(".") and plot_png(curve) for curve in found.values())
    assert found["weight-chain"].series["published_bytes"] == ((1.0, 2.0), (8.0, 8.0))
    low, high = found["solve-rate"].intervals["solve_rate"]
    assert low[0] == pytest.approx(0.2366, abs=1e-4)  # Wilson, 5 of 10
    assert high == pytest.approx((0.7634, 1.0), abs=1e-4)
    assert found["evaluation"].series["average"][0] == (0.0, 2.0)
    assert found["evaluation"].intervals == {
        "average": ((0.3, 0.3), (0.5, 0.5)),
        "best": ((0.45, 0.45), (0.75, 0.75)),
    }


def test_the_dashboard_draws_more_than_prefect_each_metric_once() -> None:
    row = {
        "step": 1,
        **STEP,
        "loss": 0.1,
        "learning_rate": 1e-4,
        "reward_correct_mean": 0.4,
        "reward_style_mean": 0.1,
        "reward_comments_mean": 0.0,  # at every step: not drawn
        "outcome_finished_total": 9,
        "hack_any_ratio": 0.0,
        "step_seconds": 9.0,
        "trainer_waited_seconds": 4.0,
        "train_seconds": 5.0,
        "publish_seconds": 1.0,
        "evaluation_seconds": 30.0,
    }
    drawn = {curve.key: curve for curve in panels([row])}
    pictured = {curve.key for curve in rl_curves([row])}
    assert drawn.keys() - pictured == {
        "evaluation", "learning-rate", "policy-loss", "reward-terms", "outcomes", "hacks", "step-time",
    }  # fmt: skip
    assert all(curve.section for curve in drawn.values())
    assert drawn["reward-terms"].series.keys() == {"reward_correct_mean", "reward_style_mean"}
    assert len(drawn["step-time"].series) == 5
    named = [name for curve in drawn.values() for name in curve.series]
    assert len(named) == len(set(named))
    assert [curve.key for curve in panels([{"step": 1, "loss": 2.0}])] == ["loss"]


def test_steps_without_groups_have_no_band(tmp_path: Path) -> None:
    found = curves_of(tmp_path, STEP, {"solve_rate": 0.5})
    assert found["solve-rate"].intervals == {}


def test_training_has_loss_perplexity_and_the_depths_of_draft_layers(tmp_path: Path) -> None:
    row = {"loss": 2.0, "perplexity": 11.0, "kl_nats_0": 0.1, "kl_nats_1": 0.2}
    found = curves_of(tmp_path, row, row)
    assert found.keys() == {"loss", "perplexity", "kl"}
    assert found["kl"].series.keys() == {"kl_nats_0", "kl_nats_1"}
    assert curves_of(tmp_path, {"solved_attempts": 1}) == {}


def test_pictures_are_described_and_one_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr(
        curves, "show_image", lambda _, key, description: shown.append((key, description))
    )
    good = curves_of(tmp_path, {"loss": 2.0})["loss"]
    broken = good.model_copy(update={"series": {"loss": ((1.0,), (1.0, 2.0))}})
    show_curves("pretraining", REF, [broken, good], "[plots](/)")
    assert shown == [("pretraining-loss", f"{good.expected} (reinforced/toy@1) [plots](/)")]
