"""Error rates of the guard over simulated canaries with known true effects.

    python -m tests.benchmarks.canary [--canaries 500] [--quick]

Each canary is a stream of independent interactions, half of them the candidate's, judged with the
default settings at each of its looks (between them it only waits). Prints the share that is withdrawn
and after how many interactions of the candidate (median of those withdrawn), by effect on the share
of edits that are kept (60 % on the champion; 70 % of edits are kept or reverted at all, 20 % of
follow-ups are dissatisfied).
"""

import argparse
import json
import statistics

import numpy as np

from ostinato.tasks.promotion.config import GuardConfig
from ostinato.tasks.promotion.guard import CANDIDATE, CONTROL, Advice, Observation, judge_canary

_SEED = 0
_KEPT, _SAID, _DISSATISFIED, _SPREAD = 0.6, 0.7, 0.2, 0.4
_EFFECTS = (0.0, 0.02, -0.1, -0.2, -0.4)  # on the share of edits kept
_MOST_FALSE = 0.05


def simulate(effect: float, config: GuardConfig, chance: np.random.Generator) -> int | None:
    """Interactions of the candidate after which it is withdrawn. None: promoted."""
    most = config.minimum_interactions << (config.looks - 1)
    told: list[Observation] = []
    for index in range(most):
        told += [
            _observe(CONTROL, index, _KEPT, chance),
            _observe(CANDIDATE, index, _KEPT + effect, chance),
        ]
    report = judge_canary(told, config, 0.5, config.minimum_seconds)
    if report.advice is Advice.PROMOTE:
        return None
    return max(measure.candidate_count for measure in report.measures)


def _observe(arm: str, index: int, kept: float, chance: np.random.Generator) -> Observation:
    return Observation(
        arm=arm,
        session_id=f"{arm}-{index}",
        kept=bool(chance.random() < kept) if chance.random() < _SAID else None,
        dissatisfied=bool(chance.random() < _DISSATISFIED),
        latency_seconds=float(5.0 * chance.lognormal(0, _SPREAD)),
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--canaries", type=int, default=500, help="per effect")
    parser.add_argument("--quick", action="store_true", help="40 per effect")
    options = parser.parse_args()
    chance, config = np.random.default_rng(_SEED), GuardConfig()
    figures: dict[str, float] = {}
    for effect in _EFFECTS:
        ends = [
            simulate(effect, config, chance)
            for _ in range(40 if options.quick else options.canaries)
        ]
        withdrawn = [end for end in ends if end is not None]
        name = f"{100 * effect:+.0f}_points"
        figures[f"withdrawn_{name}"] = len(withdrawn) / len(ends)
        figures[f"median_delay_{name}"] = statistics.median(withdrawn) if withdrawn else 0
        print(
            f"{name:>12}  withdrawn {figures[f'withdrawn_{name}']:6.1%}  after {figures[f'median_delay_{name}']:g}"
        )
    targets = {"withdrawn_+0_points": _MOST_FALSE}
    met = figures["withdrawn_+0_points"] <= _MOST_FALSE
    print(json.dumps({"name": "canary", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
