"""The plan's step times beside published ones.

Run with `python -m tests.benchmarks.plan_published`. Points, sources and what was assumed are in
`plan_published.toml`. Nine of the plan's inputs are fitted to the points of one half (`plan_fit.py`); the first byte of
the SHA-256 of a point's name decides its half. Prints one JSON line at the end.
"""

import hashlib
import json
import statistics
import tomllib
from pathlib import Path
from typing import Any

from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.tasks.planning.inputs import Inputs, RolloutWork, TrainingWork, load_inputs
from ostinato.tasks.planning.placements import fixed_seconds, step_seconds
from ostinato.tasks.planning.plan import estimate_step
from ostinato.tasks.planning.publishing import publish_bytes
from ostinato.tasks.planning.rollouts import generation_seconds

POINTS = Path(__file__).with_suffix(".toml")
PROMPT_TOKENS = 150.0  # of OpenMathInstruct-2; assumed
TARGET = 0.2
Point = dict[str, Any]


def read_points() -> tuple[list[Point], dict[str, ModelSpec]]:
    """All points, each with its chip, and their models by name."""
    points = tomllib.loads(POINTS.read_text())
    shapes = points["models"].items()
    found = [{"chip": "h100", **point} for point in (*points["training"], *points["rl"])]
    return found, {name: ModelSpec.model_validate(shape) for name, shape in shapes}


def is_fitted(point: Point) -> bool:
    """Whether a point is in the half that inputs are fitted to."""
    return hashlib.sha256(point["name"].encode()).digest()[0] % 2 == 0


def published(point: Point) -> float:
    """Tokens per second and GPU, or seconds of an RL step."""
    return point.get("seconds") or point["tokens_per_second_per_gpu"]


def predict(point: Point, spec: ModelSpec, inputs: Inputs) -> float:
    """What the plan says in place of the published figure."""
    if "seconds" in point:
        return _rl_seconds(point, spec, inputs)
    rows = point["row_tokens"]
    work = TrainingWork(
        row_tokens=rows,
        attended_tokens=rows,
        microbatch_tokens=rows * point["microbatch_rows"],
        step_tokens=rows * point["step_rows"],
        fp8=point.get("fp8", False),
        recompute=point.get("recompute", False),
    )
    layout = ParallelLayout.over(point["gpus"], **point["degrees"])
    return work.step_tokens / point["gpus"] / estimate_step(spec, layout, work, inputs).seconds


def _rl_seconds(point: Point, spec: ModelSpec, inputs: Inputs) -> float:
    mean, longest = point["mean_tokens"], point["longest_tokens"]
    attempts = RolloutWork(
        attempts=point["attempts"],
        prompt_tokens=PROMPT_TOKENS,
        generated_tokens=mean - PROMPT_TOKENS,
        longest_generated_tokens=longest - PROMPT_TOKENS,
        tool_seconds=0,
    )
    work = TrainingWork(
        row_tokens=longest,
        attended_tokens=mean,
        microbatch_tokens=longest,
        step_tokens=point["step_attempts"] * mean,
        forward_passes=2,
        is_reinforcement=True,
    )
    steps = point["attempts"] // point["step_attempts"]
    at_once = point.get("is_asynchronous", False)
    gpus = point["gpus"] // 2 if at_once else point["gpus"]
    layout = ParallelLayout.over(gpus, **point["degrees"])
    training = steps * estimate_step(spec, layout, work, inputs).seconds
    generation = generation_seconds(spec, gpus, point["replica_gpus"], attempts, inputs)
    swap = publish_bytes(spec, inputs.costs).anchor_seconds(point["replica_gpus"], inputs)
    fixed = fixed_seconds(inputs.costs, shares_gpus=not at_once)
    return step_seconds(training, generation, swap, fixed, at_once=at_once)


def errors(points: list[Point], models: dict[str, ModelSpec]) -> dict[str, float]:
    """Predicted over published, less 1, by the points' names."""
    return {
        point["name"]: predict(point, models[point["model"]], load_inputs(point["chip"]))
        / published(point)
        - 1
        for point in points
    }


def figures(points: list[Point], found: dict[str, float]) -> dict[str, Any]:
    """Points, median error and number within the target, of each half."""
    halves = {}
    for half in ("fitted", "blind"):
        names = [point["name"] for point in points if is_fitted(point) is (half == "fitted")]
        sizes = [abs(found[name]) for name in names]
        halves[half] = {
            "points": len(sizes),
            "median_error": statistics.median(sizes),
            "largest_error": max(sizes),
            "within_target": sum(size <= TARGET for size in sizes),
        }
    return halves


def main() -> None:
    """Print the table and the figures."""
    points, models = read_points()
    found = errors(points, models)
    print(f"{'point':<56} {'published':>10} {'plan':>10} {'error':>7} half")
    for point in points:
        error = found[point["name"]]
        value, half = published(point), "fitted" if is_fitted(point) else "blind"
        print(
            f"{point['name']:<56} {value:>10.1f} {value * (1 + error):>10.1f} {error:>+7.0%} {half}"
        )
    halves = figures(points, found)
    targets = {"blind median_error": f"<= {TARGET}"}
    met = halves["blind"]["median_error"] <= TARGET
    row = {"name": "plan_published", "figures": halves | {"errors": found}}
    print(json.dumps(row | {"targets": targets, "met": met}))


if __name__ == "__main__":
    main()
