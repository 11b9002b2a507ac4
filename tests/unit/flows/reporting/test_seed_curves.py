"""Curves of several seeds in one plot, from files as runs leave them."""

import json
from pathlib import Path

import pytest

from ostinato.flows.stages.curves import newest_runs, seed_curves
from ostinato.infra.platform.cluster.workspace import RequestEnvelope


def finished_run(
    home: Path, seed: int, name: str, rates: list[float], *, done: bool = True, rate: float = 1e-3
) -> Path:
    place = home / "runs" / f"nano-seed{seed}" / f"reinforced-{name}"
    place.mkdir(parents=True)
    rows = [
        {"step": step, "solve_rate": solved, "groups": 10} for step, solved in enumerate(rates, 1)
    ]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    # a request as the stage's child gets it: names, places and seeds are the run's own
    request = {
        "run_id": f"reinforced-{name}",
        "checkpoint_directory": f"/models/{name}",
        "rollout": {"seed": seed, "group_size": 8},
        "learning": {"learning_rate": rate},
    }
    envelope = RequestEnvelope(entry="x", fingerprint="f", request=request)
    (place / "request.json").write_text(envelope.model_dump_json())
    if done:
        (place / "published.txt").write_text("reinforced/nano@1")
    return place


def test_each_seed_is_one_line_of_the_curve_with_its_newest_finished_run(tmp_path: Path) -> None:
    here = finished_run(tmp_path, 0, "old", [0.1, 0.2])
    assert seed_curves(newest_runs(tmp_path, "nano", here)) == []
    here = finished_run(tmp_path, 0, "new", [0.3, 0.4])
    finished_run(tmp_path, 2, "one", [0.5, 0.6])
    finished_run(tmp_path, 2, "under-way", [0.9], done=False)
    (curve,) = seed_curves(newest_runs(tmp_path, "nano", here))
    assert curve.series == {
        "seed 0": ((1.0, 2.0), (0.3, 0.4)),
        "seed 2": ((1.0, 2.0), (0.5, 0.6)),
    }
    assert curve.intervals.keys() == curve.series.keys()
    low, high = curve.intervals["seed 2"]
    assert low[0] == pytest.approx(0.2366, abs=1e-4)  # Wilson, 5 of 10
    assert high[0] == pytest.approx(0.7634, abs=1e-4)


def test_a_seed_that_was_trained_with_other_settings_is_no_line(tmp_path: Path) -> None:
    here = finished_run(tmp_path, 0, "mine", [0.1, 0.2])
    finished_run(tmp_path, 1, "alike", [0.3, 0.4])
    finished_run(tmp_path, 1, "other", [0.9, 0.9], rate=1e-2)
    finished_run(tmp_path, 2, "other", [0.9, 0.9], rate=1e-2)
    (curve,) = seed_curves(newest_runs(tmp_path, "nano", here))
    assert {name: values for name, (_, values) in curve.series.items()} == {
        "seed 0": (0.1, 0.2),
        "seed 1": (0.3, 0.4),
    }
