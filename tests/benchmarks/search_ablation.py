"""What code search is worth to an agent: solve rates with and without it on the same problems.

    python -m tests.benchmarks.search_ablation [--recipe tests/benchmarks/nano_search.toml] [--seed N]

Trains and evaluates two agents that differ in code search alone, from one shared checkpoint (about 25 minutes on two
cores; what the home holds is not built again), and prints both with 90 % intervals, the paired difference, and the
cost of locating the function. The recipe holds what both share; theirs are called the same with _with and _without.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato.flows.stages import chain
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.evaluation.attempts import TRAJECTORIES_FILE, read_trajectories
from ostinato.tasks.evaluation.statistics import PairedDifference
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.records import Metric, Split, Trajectory
from tests.benchmarks.beside_server import ensure_server
from tests.benchmarks.locating import ArmComparison, LocatingRow, compare_arms, locating_row

RECIPE = Path(__file__).with_name("nano_search.toml")
TARGETS = {"solved_difference_low": 0.0, "located_difference_low": 0.0}
PERCENT = ("solved", "shown", "located")
COSTS = ("turns", "searches", "generated_tokens")


def compare(recipe: Path, seed: int | None) -> ArmComparison:
    """Trains and evaluates both arms. Returns their comparison."""
    shared = StageContext.open(str(recipe), seed)
    problems = chain.build_problems(shared)
    start = chain.pretrain(shared, chain.build_corpus(shared, problems))
    rows = []
    for name in ("with", "without"):
        path = recipe.with_name(f"{recipe.stem}_{name}.toml")
        arm = StageContext.open(str(path), shared.recipe.seed)
        checkpoint = chain.pretrain(arm, chain.build_corpus(arm, problems), start)
        evaluated = chain.evaluation(arm, problems, checkpoint, Split.HELD_OUT)
        rows.append(read_rows(arm, problems, evaluated))
    return compare_arms(*rows, confidence=shared.recipe.evaluation.confidence)


def read_rows(
    context: StageContext, problems: ArtifactRef, evaluated: ArtifactRef
) -> list[LocatingRow]:
    """A row per attempt of an evaluation."""
    known = {item.problem_id: item for item in load_problems(context.directory_of(problems))}
    kept = read_trajectories(context.directory_of(evaluated) / TRAJECTORIES_FILE)
    rows = []
    for row in kept:
        del row["step"]
        row["transcript"]["segments"] = ()  # not kept: tokens of all attempts
        rows.append(locating_row(known[row["problem_id"]], Trajectory.model_validate(row)))
    return rows


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
    """Prints the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    ensure_server("tests.benchmarks.search_ablation")
    found = compare(options.recipe, options.seed)
    show(found)
    figures = flatten(found)
    met = all(figures[name] > target for name, target in TARGETS.items())
    print(
        json.dumps({"name": "search_ablation", "figures": figures, "targets": TARGETS, "met": met})
    )


if __name__ == "__main__":
    main()
