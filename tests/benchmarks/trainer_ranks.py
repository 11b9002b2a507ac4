"""The RL trainer's step and publish on one and on two ranks, in turns, on the same samples.

Run with `python -m tests.benchmarks.trainer_ranks [--quick]`. The nano model; 96 samples of about
300 tokens, half of them sampled, with routes replayed. `step` is a whole step as the orchestrator
sees it; `publish` is what the trainer waits for when it does nothing beside it. Two ranks need two
idle cores. Prints one JSON line at the end.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from infra.objects import ObjectStore
from models.build import build_trainer_model
from models.checkpoint import save_checkpoint
from models.presets import NANO
from tasks.learning.config import LearningConfig, TrainerRequest
from tasks.learning.trainer import RLTrainer
from tasks.records import Sample
from tests.unit.tasks.learning.samples import make_sample

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


def measure(directory: Path, start: Path, samples: list[Sample], world_size: int, steps: int):
    """Seconds of each step and of each publish, after a first one of each; seconds until the trainer stood."""
    request = TrainerRequest(
        config=LearningConfig(world_size=world_size),
        checkpoint_directory=str(start),
        work_directory=str(directory / "work"),
        object_store_url=f"file://{directory}/objects",
        chain_id="chain",
    )
    began = time.perf_counter()
    trainer = RLTrainer(request, ObjectStore.from_url(request.object_store_url))
    stood = time.perf_counter()
    step_seconds, publish_seconds = [], []
    try:
        for _ in range(1 + steps):
            at = time.perf_counter()
            trainer.train_step(samples)
            stepped = time.perf_counter()
            trainer.publish()
            step_seconds.append(stepped - at)
            publish_seconds.append(time.perf_counter() - stepped)
    finally:
        trainer.close()
    return step_seconds[1:], publish_seconds[1:], stood - began


def main() -> None:
    """Print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="24 samples, one round")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    samples = make_samples(24 if arguments.quick else 96)
    rounds, steps = (1, 2) if arguments.quick else (3, 3)
    step_seconds, publish_seconds = defaultdict(list), defaultdict(list)
    start_seconds = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        weights = build_trainer_model(NANO, seed=0).export_weights()
        start = save_checkpoint(Path(folder) / "start", NANO, weights)
        for number in range(rounds):
            for world_size in WORLD_SIZES:
                directory = Path(folder) / f"{number}-{world_size}"
                taken = measure(directory, start, samples, world_size, steps)
                step_seconds[world_size] += taken[0]
                publish_seconds[world_size] += taken[1]
                start_seconds[world_size].append(taken[2])
    tokens = sum(len(sample.segment.token_ids_T) for sample in samples)
    print(f"{len(samples)} samples, {tokens} tokens; medians of {rounds * steps}")
    print("ranks  step s  tokens/s  publish s  start s")
    for world_size in WORLD_SIZES:
        step = statistics.median(step_seconds[world_size])
        print(
            f"{world_size:>5} {step:>7.2f} {tokens / step:>9.0f} "
            f"{statistics.median(publish_seconds[world_size]):>10.3f} "
            f"{statistics.median(start_seconds[world_size]):>8.1f}"
        )
    one, two = (statistics.median(step_seconds[size]) for size in WORLD_SIZES)
    figures = {
        "step_seconds_1": one,
        "step_seconds_2": two,
        "step_speedup_2": one / two,
        "publish_seconds_1": statistics.median(publish_seconds[1]),
        "publish_seconds_2": statistics.median(publish_seconds[2]),
        "start_seconds_2": statistics.median(start_seconds[2]),
    }
    targets = {"step_speedup_2": ">= 1.6"}
    print(
        json.dumps(
            {
                "name": "trainer_ranks",
                "figures": {name: round(value, 4) for name, value in figures.items()},
                "targets": targets,
                "met": figures["step_speedup_2"] >= 1.6,
            }
        )
    )


if __name__ == "__main__":
    main()
