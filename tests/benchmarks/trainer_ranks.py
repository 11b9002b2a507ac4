"""The RL trainer's step and publish on one and on two ranks, in turns, on the same samples.

Run with `python -m tests.benchmarks.trainer_ranks [--quick] [--rounds N]`. The nano model; 96 samples of about
300 tokens, half of them sampled, with routes replayed. `step` is a whole step, `core` the processor time that the first
rank spends in it; `publish` is what the trainer waits for when it does nothing beside it. `step` needs as many idle
cores as ranks, `core` tells on a busy machine too how evenly the work is assigned. Prints one JSON line at the end.
"""

import argparse
import contextlib
import json
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from ostinato.infra.platform.objects import ObjectStore
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.layout import ParallelLayout
from ostinato.models.network.build import build_trainer_model
from ostinato.models.training.data_parallel import run_ranks
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.config import LearningConfig, TrainerRequest
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from tests.fakes.nano_spec import NANO
from tests.unit.tasks.reinforcement.learning.samples import make_sample

WORLD_SIZES = (1, 2)


def make_samples(count: int) -> list[Sample]:
    """Random tokens; lengths spread by a sixth around 300; every token's routes are given."""
    generator = np.random.default_rng(0)
    samples = []
    for index in range(count):
        length = int(np.clip(generator.normal(300, 50), 100, 500))
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        sample = make_sample(
            index,
            generator.integers(0, NANO.vocab_size, length).tolist(),
            mask.tolist(),
            advantage=float(generator.normal()),
            logprobs=[-float(np.log(NANO.vocab_size))] * length,
            spec=NANO,
        )
        scores = generator.random((length, NANO.num_layers, NANO.num_experts))
        routes_TLK = np.argsort(scores, axis=-1)[..., : NANO.experts_per_token].astype(np.int16)
        segment = sample.segment.model_copy(update={"routed_experts_TLK": routes_TLK})
        samples.append(sample.model_copy(update={"segment": segment}))
    return samples


Figures = dict[str, list[float]]  # name of a phase -> seconds of each time


def measure(given: tuple[TrainerRequest, list[Sample], int], _: int) -> Figures:
    """Seconds of each step and publish after a first one of each."""
    request, samples, steps = given
    objects = ObjectStore.from_url(f"file://{Path(request.work_directory).parent}/objects")
    figures: Figures = defaultdict(list)
    with contextlib.closing(RLTrainer(request, objects)) as trainer:
        for _ in range(1 + steps):
            at, core_at = time.perf_counter(), time.process_time()
            trainer.step(samples)
            stepped = time.perf_counter()
            figures["core"].append(time.process_time() - core_at)
            trainer.publish()
            figures["step"].append(stepped - at)
            figures["publish"].append(time.perf_counter() - stepped)
    return {name: seconds[1:] for name, seconds in figures.items()}


def main() -> None:
    """Print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="24 samples, one round")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each number of ranks")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    samples = make_samples(24 if arguments.quick else 96)
    rounds, steps = (1, 2) if arguments.quick else (arguments.rounds, 3)
    taken: dict[int, Figures] = {world_size: defaultdict(list) for world_size in WORLD_SIZES}
    with tempfile.TemporaryDirectory() as folder:
        weights = build_trainer_model(NANO, seed=0).export_weights()
        start = save_checkpoint(Path(folder) / "start", NANO, weights)
        for number in range(rounds):
            for world_size in WORLD_SIZES:
                directory = Path(folder) / f"{number}-{world_size}"
                request = TrainerRequest(
                    config=LearningConfig(world_size=world_size),
                    checkpoint_directory=str(start),
                    work_directory=str(directory / "work"),
                    chain_id="chain",
                )
                given = request, samples, steps
                seen = run_ranks(measure, given, ParallelLayout(data=world_size))
                for name, seconds in seen.items():
                    taken[world_size][name] += seconds
    one, two = (
        {name: statistics.median(seconds) for name, seconds in taken[world_size].items()}
        for world_size in WORLD_SIZES
    )
    tokens = sum(len(sample.segment.token_ids_T) for sample in samples)
    print(f"{len(samples)} samples, {tokens} tokens; medians of {rounds * steps}, seconds")
    print("ranks   step   core  publish  tokens/s")
    for world_size, row in zip(WORLD_SIZES, (one, two), strict=True):
        print(
            f"{world_size:>5} {row['step']:>6.2f} {row['core']:>6.2f} {row['publish']:>8.3f} "
            f"{tokens / row['step']:>9.0f}"
        )
    figures = {
        "step_speedup_2": one["step"] / two["step"],
        "core_speedup_2": one["core"] / two["core"],
        "step_seconds_1": one["step"],
        "step_seconds_2": two["step"],
        "publish_seconds_1": one["publish"],
        "publish_seconds_2": two["publish"],
    }
    print(
        json.dumps(
            {
                "name": "trainer_ranks",
                "figures": {name: round(value, 4) for name, value in figures.items()},
                "targets": {"step_speedup_2": ">= 1.6"},
                "met": figures["step_speedup_2"] >= 1.6,
            }
        )
    )


if __name__ == "__main__":
    main()
