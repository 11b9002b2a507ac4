"""Writes what simulations showed: a table for people, JSON for programs, a plot of time.

Numbers come from the figures alone.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ostinato.infra.sandbox.simulator.measurements import SimulationFigures

_INCHES = (9.0, 9.0)


def table_lines(figures: Sequence[SimulationFigures]) -> list[str]:
    """A Markdown table, a column a simulation."""
    rows: dict[str, list[str]] = {}
    for one in figures:
        for name, text in _cells(one).items():
            rows.setdefault(name, []).append(text)
    names = [one.scenario for one in figures]
    lines = [f"| figure | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    lines += [f"| {name} | {' | '.join(texts)} |" for name, texts in rows.items()]
    return lines


def write_report(
    folder: Path, figures: Sequence[SimulationFigures], context: Mapping[str, object]
) -> tuple[Path, Path, Path]:
    """`fleet.md`, `fleet.json` and `fleet.png`. `context`: where the costs came from."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data, plot = (folder / f"fleet.{suffix}" for suffix in ("md", "json", "png"))
    remarks = [f"- {name}: {value}" for name, value in context.items()]
    table.write_text("\n".join(["# Simulated fleets", "", *remarks, "", *table_lines(figures), ""]))
    content = {
        "context": dict(context),
        "simulations": [one.model_dump(mode="json") for one in figures],
    }
    data.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    _plot(figures[0], plot)
    return table, data, plot


def _cells(one: SimulationFigures) -> dict[str, str]:
    none = "-"
    cells = {
        "nodes": f"{one.num_nodes}",
        "simulated seconds": f"{one.simulated_seconds:.0f}",
        "requests": f"{one.asked:,}",
        "boxes started": f"{one.started:,}",
        "starts/s, mean / best 10 s": (
            f"{one.starts_per_second_mean:,.0f} / {one.starts_per_second_peak:,.0f}"
        ),
        "boxes lent at once, most": f"{one.peak_alive:,}",
    }
    for priority in ("verifier", "evaluation", "training"):
        wait = one.waits.get(priority)
        cells[f"wait of {priority}, p50 / p99 ms"] = (
            f"{wait.p50_seconds * 1e3:,.0f} / {wait.p99_seconds * 1e3:,.0f}" if wait else none
        )
    cells |= {
        "refused": ", ".join(f"{name} {count:,}" for name, count in one.refused.items()) or "0",
        "served by a warm box": f"{one.warm_hits:,}",
        "forks at home / copied": f"{one.forks_at_home:,} / {one.forks_copied:,}",
        "holders that died / leases reaped": f"{one.dead_holders:,} / {one.reaped:,}",
        "leases moved / reported lost": f"{one.moved_leases:,} / {one.lost_leases:,}",
        "requests nobody accounts for": f"{one.unaccounted_requests}",
        "promised beyond the declared limit": f"{one.overcommitted_nodes}",
        "boxes ended for memory": f"{one.memory_kills:,}",
        "worst node: memory / CPU demand": (
            f"{one.worst_memory_ratio:.0%} / {one.worst_cpu_ratio:.0%}"
        ),
    }
    return cells


def _plot(one: SimulationFigures, path: Path) -> None:
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    upper, middle, lower = figure.subplots(3, 1, sharex=True)
    at_seconds = [sample.at_seconds for sample in one.samples]
    upper.plot(at_seconds, [sample.alive for sample in one.samples], label="lent")
    upper.plot(at_seconds, [sample.waiting for sample in one.samples], label="waiting")
    upper.set_ylabel("boxes")
    upper.legend()
    started = [sample.started for sample in one.samples]
    by_second = [after - before for before, after in itertools.pairwise(started)]
    middle.plot(at_seconds[1:], by_second)
    middle.set_ylabel("starts a second")
    for name, values in (
        ("memory, worst node", [sample.worst_memory_ratio for sample in one.samples]),
        ("CPU demand, worst node", [sample.worst_cpu_ratio for sample in one.samples]),
        ("CPU demand, mean", [sample.mean_cpu_ratio for sample in one.samples]),
    ):
        lower.plot(at_seconds, values, label=name)
    lower.set_ylabel("share of a node")
    lower.set_xlabel("simulated seconds")
    lower.legend()
    figure.suptitle(f"{one.scenario}, seed {one.seed}: {one.num_nodes} nodes")
    figure.savefig(path, dpi=110)
