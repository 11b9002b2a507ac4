"""Host memory that a rank of the RL trainer takes for publishing and saving, on one, two and four ranks.

Run with `python -m tests.benchmarks.trainer_memory [--quick]`. A model of 97 M parameters (`--quick`: 7 M), four
steps on random samples, of which all but the first are measured: the peak of the process's own memory during
`publish` and `save` over what it held before them, the largest of all ranks. Weights leave a rank as the tensors
that it owns, so the peak falls as one over the ranks. Prints one JSON line at the end.
"""

import argparse
import contextlib
import gc
import json
import logging
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ostinato.infra.platform.objects import ObjectStore
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.layout import ParallelLayout
from ostinato.models.network.build import build_trainer_model
from ostinato.models.spec import ModelSpec
from ostinato.models.training.allocator import return_free_memory
from ostinato.models.training.data_parallel import run_ranks
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ParityConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.ranks import gather_over_ranks
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from tests.fakes.small_spec import make_spec
from tests.unit.tasks.reinforcement.learning.samples import make_sample

WORLD_SIZES = (1, 2, 4)
REPEATS = 3  # a publish runs beside the save, and a watch of 5 ms misses peaks on a busy machine
LARGEST_RATIO = (
    1.4  # of the peak of N ranks to an Nth of the peak of one: tensors are shared out whole
)


def own_bytes() -> int:
    """Memory of this process that is no file's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@contextlib.contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """Appends the largest growth of the process's own memory within the block."""
    gc.collect()
    return_free_memory(0)  # else the growth is taken from what the allocator kept
    before, is_over, found = own_bytes(), threading.Event(), [0]
    seen: list[int] = []

    def watch() -> None:
        while not is_over.wait(0.005):
            found[0] = max(found[0], own_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()
        seen.append(found[0])


def make_samples(spec: ModelSpec, count: int) -> list[Sample]:
    """Random tokens, half of them sampled."""
    generator = np.random.default_rng(0)
    return [
        make_sample(
            index,
            generator.integers(0, spec.vocab_size, 32).tolist(),
            [place % 2 == 1 for place in range(32)],
            advantage=float(generator.normal()),
            logprobs=[-float(np.log(spec.vocab_size))] * 32,
            spec=spec,
        )
        for index in range(count)
    ]


def measure(given: tuple[TrainerRequest, list[Sample]], _: int) -> int:
    """Largest peak of the publishes and saves after the first one, of all ranks."""
    request, samples = given
    objects = ObjectStore.from_url(f"file://{Path(request.work_directory).parent}/objects")
    with contextlib.closing(RLTrainer(request, objects)) as trainer:
        trainer.step(samples)
        trainer.publish()
        peaks = []
        for _ in range(REPEATS):
            trainer.step(samples)
            with peak_bytes() as seen:
                trainer.start_publish()
                trainer.save()
                trainer.finish_publish()
            peaks += seen
        return max(gather_over_ranks(max(peaks)))


def peaks_by_ranks(spec: ModelSpec, directory: Path) -> dict[int, int]:
    """Largest peak of a rank, by number of ranks."""
    weights = build_trainer_model(spec, seed=0).export_weights()
    start = save_checkpoint(directory / "start", spec, weights)
    del weights
    gc.collect()
    peaks = {}
    for ranks in WORLD_SIZES:
        request = TrainerRequest(
            config=LearningConfig(world_size=ranks, parity=ParityConfig(earlier_versions=0)),
            checkpoint_directory=str(start),
            work_directory=str(directory / str(ranks) / "work"),
            chain_id="chain",
        )
        given = request, make_samples(spec, 8)
        peaks[ranks] = run_ranks(measure, given, ParallelLayout(data=ranks))
    return peaks


def main() -> None:
    """Print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a model of 7 M parameters")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    width, layers, experts = (256, 6, (4, 2, 256)) if arguments.quick else (768, 8, (8, 2, 512))
    heads = (8, 8, width // 8)
    spec = make_spec(
        4096, width, heads=heads, experts=experts, num_layers=layers, max_sequence_tokens=64
    )
    with tempfile.TemporaryDirectory() as folder:
        peaks = peaks_by_ranks(spec, Path(folder))
    print(f"{num_parameters(spec) / 1e6:.1f} M parameters; largest peak of a rank, MiB")
    for ranks, peak in peaks.items():
        print(f"{ranks:>5} ranks {peak / 2**20:>8.0f}")
    ratios = {ranks: peak * ranks / peaks[1] for ranks, peak in peaks.items()}
    print(
        json.dumps(
            {
                "name": "trainer_memory",
                "figures": {f"peak_mib_{n}": round(one / 2**20, 1) for n, one in peaks.items()},
                "targets": {"peak of N ranks times N over that of one": f"<= {LARGEST_RATIO}"},
                "met": max(ratios.values()) <= LARGEST_RATIO,
            }
        )
    )


if __name__ == "__main__":
    main()
