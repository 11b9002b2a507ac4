"""Nine of the plan's inputs, fitted to one half of the published points and tried on the other.

Run with `python -m tests.benchmarks.plan_fit`. Prints the inputs that it finds, which `tasks/planning/inputs.toml` then
gets, and one JSON line with the errors of both halves.
"""

import json
from collections.abc import Iterable

import numpy as np
from scipy.optimize import minimize

from ostinato.tasks.planning.inputs import Inputs, load_inputs
from tests.benchmarks.plan_published import (
    TARGET,
    Point,
    figures,
    is_fitted,
    predict,
    published,
    read_points,
)

# beginnings of the search; a fit that leaves them pays 0.002 per squared natural logarithm
START = {
    ("rates", "hidden_half"): 2000.0,
    ("rates", "expert_half"): 1500.0,
    ("rates", "decode"): 0.4,
    ("shares", "tensor"): 0.5,  # above 1: slower than the link
    ("shares", "expert"): 0.4,
    ("costs", "engine_step_seconds"): 0.008,
    ("costs", "rl_training_factor"): 1.3,
    ("costs", "rl_switch_seconds"): 30.0,
    ("costs", "rl_fixed_seconds"): 15.0,
}
# largest values: a decoding step reads memory no faster than a copy does, and shares are of one
MOST = {("rates", "decode"): 0.9, ("shares", "tensor"): 1.0, ("shares", "expert"): 1.0}
ROUNDS = 4  # of each search; a round begins where the last one ended
Values = dict[tuple[str, str], float]


def varied(inputs: Inputs, values: Values) -> Inputs:
    """The inputs with other values of the fitted ones."""
    for (section, name), value in values.items():
        part = getattr(inputs, section).model_copy(update={name: value})
        inputs = inputs.model_copy(update={section: part})
    return inputs


def current(inputs: Inputs) -> Values:
    """The plan's own values of the fitted inputs."""
    return {(section, name): getattr(getattr(inputs, section), name) for section, name in START}


class Fit:
    """The points, and the search for inputs."""

    def __init__(self) -> None:
        self.points, self._models = read_points()
        self._chips = {point["chip"]: load_inputs(point["chip"]) for point in self.points}

    def errors(self, points: Iterable[Point], values: Values) -> dict[str, float]:
        """Predicted over published, less 1, by the points' names."""
        chips = {name: varied(inputs, values) for name, inputs in self._chips.items()}
        return {
            point["name"]: predict(point, self._models[point["model"]], chips[point["chip"]])
            / published(point)
            - 1
            for point in points
        }

    def loss(self, points: Iterable[Point], values: Values) -> float:
        """Mean absolute logarithm of predicted over published, and what leaving the start costs."""
        sizes = [abs(np.log1p(error)) for error in self.errors(points, values).values()]
        away = [np.log(values[name] / START[name]) for name in START]
        return float(np.mean(sizes) + 0.002 * np.sum(np.square(away)))

    def search(self, points: Iterable[Point], seeds: int = 3) -> Values:
        """Values of the least loss, from the plan's own values and from random ones near the start."""
        start, kept = np.log(list(START.values())), list(points)

        def values_of(logarithms: np.ndarray) -> Values:
            return dict(zip(START, map(float, np.exp(logarithms)), strict=True))

        def loss(logarithms: np.ndarray) -> float:
            return self.loss(kept, values_of(logarithms))

        own = np.log(list(current(load_inputs("h100")).values()))
        noise = [np.random.default_rng(seed).normal(0, 0.3, len(start)) for seed in range(seeds)]
        bounds = [(None, np.log(MOST[name]) if name in MOST else None) for name in START]
        options = {"maxfev": 500, "xatol": 1e-3, "fatol": 1e-5, "adaptive": True}
        ends = []
        for place in (own, *(start + one for one in noise)):
            for _ in range(ROUNDS):
                found = minimize(loss, place, method="Nelder-Mead", bounds=bounds, options=options)
                place = found.x
            ends.append(place)
        return values_of(min(ends, key=loss))


def main() -> None:
    """Print the values and the errors of both halves, as found and as the plan has them."""
    fit = Fit()
    found = fit.search(filter(is_fitted, fit.points))
    report = {}
    for name, values in (("found", found), ("plan", current(load_inputs("h100")))):
        print(name, json.dumps({".".join(path): value for path, value in values.items()}))
        report[name] = figures(fit.points, fit.errors(fit.points, values))
    met = report["found"]["blind"]["median_error"] <= TARGET
    targets = {"blind median_error": f"<= {TARGET}"}
    print(json.dumps({"name": "plan_fit", "figures": report, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
