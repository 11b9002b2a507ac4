"""Corrections of the plan's speeds, fitted to half of the published points and tried on the other half.

Run with `python -m tests.benchmarks.plan_fit`. Points are in `plan_published.toml`; the first byte of the SHA-256 of a
point's name decides its half (even: fitted). Prints the corrections, both halves, and one JSON line at the end.
"""

import hashlib
import json
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy.optimize import minimize

from ostinato.models.spec import ModelSpec
from ostinato.tasks.planning.inputs import Inputs, load_inputs
from tests.benchmarks.plan_published import (
    TARGET,
    predict_training,
    read_points,
    rl_parts,
    together,
)

# beginnings of the search; a fit that leaves them pays 0.002 per squared natural logarithm
START = {
    "hidden_half": 2000.0,  # hidden size at which products reach half of their rate
    "expert_half": 1500.0,  # the same for the hidden size of experts
    "expert_share": 0.4,  # of the experts' transfers, not hidden by computation
    "tensor_share": 0.5,  # of tensor-parallel transfers; above 1: slower than the link
    "decode": 0.4,  # of memory bandwidth in a decoding step
    "engine_step_seconds": 0.008,  # host time of a decoding step
    "rl_training": 1.3,  # times the seconds of a training step inside RL
    "switch_seconds": 30.0,  # between generation and training on the same GPUs
    "fixed_seconds": 15.0,  # of each RL step
}
Point = dict[str, Any]


def is_fitted(point: Point) -> bool:
    """Whether a point is in the half that the corrections are fitted to."""
    return hashlib.sha256(point["name"].encode()).digest()[0] % 2 == 0


def corrected(inputs: Inputs, spec: ModelSpec, found: dict[str, float]) -> tuple[Inputs, Inputs]:
    """Inputs of training and of generation for one model."""
    shares = {"expert": found["expert_share"], "tensor": found["tensor_share"]}
    rates = inputs.rates.model_copy(update={"decode": found["decode"]})
    costs = {"engine_step_seconds": found["engine_step_seconds"]}
    generating = inputs.model_copy(
        update={
            "shares": inputs.shares.model_copy(update=shares),
            "rates": rates,
            "costs": inputs.costs.model_copy(update=costs),
        }
    )
    wide = spec.hidden_size / (spec.hidden_size + found["hidden_half"])
    expert = spec.expert_hidden_size / (spec.expert_hidden_size + found["expert_half"])
    products = {
        "bf16_products": rates.bf16_products * wide,
        "fp8_products": rates.fp8_products * wide,
        "bf16_grouped": rates.bf16_grouped * (expert or 1.0),
        "fp8_grouped": rates.fp8_grouped * (expert or 1.0),
    }
    training = generating.model_copy(update={"rates": rates.model_copy(update=products)})
    return training, generating


def predict(point: Point, spec: ModelSpec, inputs: Inputs, found: dict[str, float]) -> float:
    """Tokens per second and GPU, or seconds of an RL step."""
    training, generating = corrected(inputs, spec, found)
    if "seconds" not in point:
        return predict_training(point, spec, training)
    trained, generated, publish = rl_parts(point, spec, training, generating)
    overhead = found["fixed_seconds"]
    overhead += 0.0 if point.get("is_asynchronous") else found["switch_seconds"]
    return together(point, trained * found["rl_training"], generated, publish + overhead)


class Fit:
    """The points, and the search for corrections."""

    def __init__(self) -> None:
        points, self._models = read_points()
        self.points: list[Point] = [*points["training"], *points["rl"]]
        self._chips = {name: load_inputs(name) for name in ("h100", "h200")}

    def error(self, point: Point, found: dict[str, float]) -> float:
        """Predicted over published, less 1."""
        inputs = self._chips[point.get("chip", "h100")]
        published = point.get("seconds") or point["tokens_per_second_per_gpu"]
        return predict(point, self._models[point["model"]], inputs, found) / published - 1

    def search(self, points: Iterable[Point], seeds: int = 3) -> dict[str, float]:
        """Corrections with the least mean absolute logarithm of predicted over published."""
        start, kept = np.log(list(START.values())), list(points)

        def loss(values: np.ndarray) -> float:
            found = dict(zip(START, np.exp(values), strict=True))
            sizes = [abs(np.log1p(self.error(point, found))) for point in kept]
            return float(np.mean(sizes) + 0.002 * np.sum((values - start) ** 2))

        options = {"maxfev": 2500, "xatol": 1e-3, "fatol": 1e-5}
        tries = [
            minimize(
                loss,
                start + np.random.default_rng(seed).normal(0, 0.3, len(start)),
                method="Nelder-Mead",
                options=options,
            )
            for seed in range(seeds)
        ]
        best = min(tries, key=lambda one: one.fun)
        return {name: float(value) for name, value in zip(START, np.exp(best.x), strict=True)}


def main() -> None:
    """Print the corrections, the points of each half, and the figures."""
    fit = Fit()
    found = fit.search(filter(is_fitted, fit.points))
    print(json.dumps(found))
    figures: dict[str, Any] = {"corrections": found}
    for half, is_of_half in (("fitted", True), ("blind", False)):
        chosen = [point for point in fit.points if is_fitted(point) is is_of_half]
        errors = {point["name"]: fit.error(point, found) for point in chosen}
        sizes = [abs(error) for error in errors.values()]
        for name, error in errors.items():
            print(f"{half:<7} {name:<44} {error:>+7.0%}")
        figures[half] = {
            "points": len(sizes),
            "median_error": statistics.median(sizes),
            "within_target": sum(size <= TARGET for size in sizes),
        }
    met = figures["blind"]["median_error"] <= TARGET
    targets = {"blind median_error": f"<= {TARGET}"}
    print(json.dumps({"name": "plan_fit", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
