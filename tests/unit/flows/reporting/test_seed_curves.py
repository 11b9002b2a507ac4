"""Curves of several seeds in one plot, from files as runs leave them."""

import json
from pathlib import Path

from ostinato.flows.reporting.rl_curves import newest_runs, seed_curves


def finished_run(
    home: Path, seed: int, name: str, rates: list[float], *, done: bool = True
) -> None:
    place = home / "runs" / f"nano-seed{seed}" / f"reinforced-{name}"
    place.mkdir(parents=True)
    rows = [{"step": step, "solve_rate": rate} for step, rate in enumerate(rates, 1)]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if done:
        (place / "published.txt").write_text("reinforced/nano@1")


def test_each_seed_is_one_line_of_the_curve_with_its_newest_finished_run(tmp_path: Path) -> None:
    finished_run(tmp_path, 0, "old", [0.1, 0.2])
    assert seed_curves(newest_runs(tmp_path, "nano")) == []
    finished_run(tmp_path, 0, "new", [0.3, 0.4])
    finished_run(tmp_path, 2, "one", [0.5, 0.6])
    finished_run(tmp_path, 2, "under-way", [0.9], done=False)
    (curve,) = seed_curves(newest_runs(tmp_path, "nano"))
    assert curve.series == {
        "seed 0": ((1.0, 2.0), (0.3, 0.4)),
        "seed 2": ((1.0, 2.0), (0.5, 0.6)),
    }
