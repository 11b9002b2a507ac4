"""Muon's step on one and on two ranks, its products repeated by each rank and shared among them, in turns.

Run with `python -m tests.benchmarks.muon_ranks [--hidden N] [--rounds N]`. A model of nano's kind without
training: gradients are random. `core` is the processor time of the first rank in one step of the
optimiser, `step` the same by the clock, which needs as many idle cores as ranks. Prints one JSON line at
the end.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

from ostinato.models.layout import ParallelLayout
from ostinato.models.network.build import build_trainer_model
from ostinato.models.spec import ModelSpec
from ostinato.models.training import optimizer as optimizer_module
from ostinato.models.training.data_parallel import run_ranks
from ostinato.models.training.optimizer import build_optimizer
from ostinato.models.training.optimizer_config import OptimizerConfig
from ostinato.models.weight_shapes import num_parameters
from tests.fakes.nano_spec import NANO

HOLDERS = {
    "repeated": lambda parameter: None,
    "shared": optimizer_module.matrix_holders,
}
Figures = dict[str, float]  # of one step, medians


def measure(given: tuple[ModelSpec, int], rank: int) -> Figures:
    """Seconds of the first rank's steps, after one of each kind."""
    spec, rounds = given
    torch.set_num_threads(1)
    model = build_trainer_model(spec, seed=0, world_size=dist.get_world_size())
    optimizer = build_optimizer(model, OptimizerConfig(kind="muon")).parts["muon"]
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    seen: dict[str, list[float]] = {}
    for turn in range(1 + rounds):
        for name, holders in HOLDERS.items():
            optimizer_module.matrix_holders = holders
            at, core_at = time.perf_counter(), time.process_time()
            optimizer.step()
            if turn:
                seen.setdefault(f"{name}_step", []).append(time.perf_counter() - at)
                seen.setdefault(f"{name}_core", []).append(time.process_time() - core_at)
    return {name: statistics.median(seconds) for name, seconds in seen.items()}


def main() -> None:
    """Print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=NANO.hidden_size, help="width of the model")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    wider = arguments.hidden // NANO.hidden_size
    spec = NANO.model_copy(
        update={
            "hidden_size": NANO.hidden_size * wider,
            "expert_hidden_size": NANO.expert_hidden_size * wider,
        }
    )
    print(f"{num_parameters(spec) / 1e6:.1f} M parameters")
    print("ranks products   step ms  core ms")
    figures: dict[str, Figures] = {}
    for ranks in (1, 2):
        found = run_ranks(measure, (spec, arguments.rounds), ParallelLayout(data=ranks))
        figures[str(ranks)] = found
        for name in HOLDERS:
            step, core = found[f"{name}_step"] * 1000, found[f"{name}_core"] * 1000
            print(f"{ranks:>5} {name:<9} {step:>8.1f} {core:>8.1f}")
    answer = {"name": "muon_ranks", "hidden": spec.hidden_size, "figures": figures}
    print(json.dumps({**answer, "targets": {}, "met": True}))


if __name__ == "__main__":
    main()
