"""What code search is worth to an agent: solve rates with and without it on the same problems.

    python -m tests.benchmarks.search_ablation [--recipe nano_search] [--seed N] [--shown]

Runs the flow search-ablation (about 25 minutes on two cores; what is already built is not built
again) and prints both arms with 90 % intervals, the paired difference, and what locating cost.
--shown: prints what the flow published before, and fails when it never ran.
"""

import argparse
import json
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from ostinato.flows.stages import chain
from ostinato.flows.stages.run_options import STAGES
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.evaluation.locating import ArmComparison
from ostinato.tasks.evaluation.statistics import PairedDifference
from ostinato.tasks.records import Metric

TARGETS = {"solved_difference_low": 0.0, "located_difference_low": 0.0}
PERCENT = ("solved", "shown", "located")
COSTS = ("turns", "searches", "generated_tokens", "read_tokens")


def read_newest(context: StageContext) -> ArmComparison:
    """The comparison that was published last for this recipe."""
    rows = context.ledger.artifacts.list(STAGES["comparison"].kind, context.recipe.name)
    newest = max(rows, key=lambda row: row.version, default=None)
    if newest is None:
        raise ConfigError(
            f"recipe {context.recipe.name}: no search-ablation in {context.settings.home}, wanted "
            "one: run without --shown"
        )
    ref = context.artifacts.get(f"{newest.kind}/{newest.name}@{newest.version}")
    return chain.result_of(context, ref, ArmComparison)


def flatten(found: ArmComparison) -> dict[str, float]:
    """All figures in one table, by name."""
    figures: dict[str, float] = {}
    for name, arm in found.arms.items():
        for key in (*PERCENT, *COSTS):
            metric: Metric = getattr(arm, key)
            figures |= {
                f"{key}_{name}": metric.mean,
                f"{key}_{name}_low": metric.low,
                f"{key}_{name}_high": metric.high,
            }
        figures[f"solved_when_located_{name}"] = arm.solved_when_located
    for key in PERCENT:
        paired: PairedDifference = getattr(found, f"{key}_difference")
        by_function: Metric = getattr(found, f"{key}_difference_by_function")
        figures |= {
            f"{key}_difference": paired.mean,
            f"{key}_difference_low": paired.low,
            f"{key}_difference_high": paired.high,
            f"{key}_difference_by_function_low": by_function.low,
            f"{key}_difference_by_function_high": by_function.high,
        }
    figures["problems"] = float(found.solved_difference.count)
    return figures


def show(found: ArmComparison) -> None:
    """Both arms side by side."""
    count = found.solved_difference.count
    table = Table(title=f"{count} problems, 90 % intervals")
    for column in ("", "with search", "without", "with - without"):
        table.add_column(column)
    arms = [found.arms["with"], found.arms["without"]]
    for key in PERCENT:
        cells = [_interval(getattr(arm, key), 100, "%") for arm in arms]
        table.add_row(key, *cells, _interval(getattr(found, f"{key}_difference"), 100, ""))
    rates = [f"{arm.solved_when_located:.1%}" for arm in arms]
    table.add_row("solved when located", *rates, "")
    for key in COSTS:
        cells = [_interval(getattr(arm, key), 1, "") for arm in arms]
        table.add_row(f"{key} before it is located", *cells, "")
    Console().print(table)


def _interval(metric: Metric | PairedDifference, factor: float, unit: str) -> str:
    mean, low, high = (factor * value for value in (metric.mean, metric.low, metric.high))
    return f"{mean:.1f}{unit} [{low:.1f}, {high:.1f}]"


def main() -> None:
    """Print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="nano_search")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--shown", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.shown:
        command = [sys.executable, "-c", "from ostinato.flows.cli import main; main()", "run"]
        command += ["search-ablation", "--recipe", options.recipe]
        command += [] if options.seed is None else ["--seed", str(options.seed)]
        subprocess.run(command, check=True)
    found = read_newest(StageContext.open(options.recipe, seed=options.seed))
    show(found)
    figures = flatten(found)
    met = all(figures[name] > target for name, target in TARGETS.items())
    print(
        json.dumps({"name": "search_ablation", "figures": figures, "targets": TARGETS, "met": met})
    )


if __name__ == "__main__":
    main()
