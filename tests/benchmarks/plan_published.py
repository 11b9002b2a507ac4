"""The plan's step times beside published ones that it was not fitted to.

Run with `python -m tests.benchmarks.plan_published`. Points, sources and what was assumed are in
`plan_published.toml`. Prints one JSON line at the end.
"""

import json
import statistics
import tomllib
from pathlib import Path
from typing import Any

from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.planning.inputs import Inputs, RolloutWork, TrainingWork, load_inputs
from ostinato.tasks.planning.plan import estimate_step
from ostinato.tasks.planning.rollouts import generation_seconds

POINTS = Path(__file__).with_suffix(".toml")
PROMPT_TOKENS = 150.0  # of OpenMathInstruct-2; assumed
TARGET = 0.2


def predict_training(point: dict[str, Any], spec: ModelSpec, inputs: Inputs) -> float:
    """Tokens per second and GPU."""
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


def predict_rl(point: dict[str, Any], spec: ModelSpec, inputs: Inputs) -> float:
    """Seconds of an RL step."""
    return together(point, *rl_parts(point, spec, inputs))


def together(point: dict[str, Any], training: float, generation: float, publish: float) -> float:
    """Seconds of a step from those of its parts."""
    if point.get("is_asynchronous"):
        return max(training, generation) + publish
    return training + generation + publish


def rl_parts(
    point: dict[str, Any], spec: ModelSpec, inputs: Inputs, generating: Inputs | None = None
) -> tuple[float, float, float]:
    """Seconds of training, generation and publish of an RL step. `generating`: inputs for the last two."""
    engines = generating or inputs
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
    )
    steps = point["attempts"] // point["step_attempts"]
    is_asynchronous = point.get("is_asynchronous", False)
    gpus = point["gpus"] // 2 if is_asynchronous else point["gpus"]
    layout = ParallelLayout.over(gpus, **point["degrees"])
    training = steps * estimate_step(spec, layout, work, inputs).seconds
    generation = generation_seconds(spec, gpus, point["replica_gpus"], attempts, engines)
    network = engines.chip.network_gigabytes_per_second * 1e9 * engines.rates.network
    return training, generation, 2 * num_parameters(spec) / point["replica_gpus"] / network


def read_points() -> tuple[dict[str, Any], dict[str, ModelSpec]]:
    """The file of points, and its models by name."""
    points = tomllib.loads(POINTS.read_text())
    shapes = points["models"].items()
    return points, {name: ModelSpec.model_validate(shape) for name, shape in shapes}


def main() -> None:
    """Print the table and the figures."""
    points, models = read_points()
    errors: dict[str, float] = {}
    print(f"{'point':<44} {'published':>10} {'predicted':>10} {'error':>7}")
    for kind, key, predict in (
        ("training", "tokens_per_second_per_gpu", predict_training),
        ("rl", "seconds", predict_rl),
    ):
        for point in points[kind]:
            inputs = load_inputs(point.get("chip", "h100"))
            predicted = predict(point, models[point["model"]], inputs)
            error = predicted / point[key] - 1
            errors[point["name"]] = error
            print(f"{point['name']:<44} {point[key]:>10.1f} {predicted:>10.1f} {error:>+7.0%}")
    sizes = [abs(error) for error in errors.values()]
    within = sum(size <= TARGET for size in sizes)
    figures = {
        "points": len(errors),
        "median_error": statistics.median(sizes),
        "largest_error": max(sizes),
        "within_target": within,
        "errors": errors,
    }
    targets = {"median_error": f"<= {TARGET}", "points": ">= 8"}
    met = figures["median_error"] <= TARGET and len(errors) >= 8
    row = {"name": "plan_published", "figures": figures, "targets": targets, "met": met}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
