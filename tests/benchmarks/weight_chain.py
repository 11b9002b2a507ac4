"""How long a version takes from trainer to engine, by density. Run: python -m tests.benchmarks.weight_chain

One line a case: share of elements changed a step, bytes stored, milliseconds to publish and to
fetch (median of the steps after the first), through a local object store. Sizes are nano's: 2 M
elements in 60 tensors.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from infra.objects import ObjectStore
from infra.weights import ChainPublisher, ChainSubscriber

ELEMENTS = 2_000_000
TENSORS = 60
STEPS = 9


def measure(dtype: torch.dtype, density: float) -> str:
    """Publishes and fetches a few steps; returns the line of the table."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"layer.{index}": torch.randn(ELEMENTS // TENSORS, generator=generator).mul(0.02).to(dtype)
        for index in range(TENSORS)
    }
    with tempfile.TemporaryDirectory() as directory:
        store = ObjectStore.from_url(f"file://{directory}")
        publisher = ChainPublisher(store, "benchmark", keep_versions=4)
        subscriber = ChainSubscriber(store, "benchmark")
        publish_ms, fetch_ms, stored = [], [], []
        for version in range(STEPS):
            manifest = timed(publish_ms, lambda v=version: publisher.publish(v, weights))
            timed(fetch_ms, lambda v=version: subscriber.fetch(v))
            stored.append(manifest.stored_bytes)
            for tensor in weights.values():
                pick = torch.rand(tensor.shape, generator=generator) < density
                tensor[pick] = (tensor[pick].float() * 1.01 + 1e-4).to(dtype)
    name = str(dtype).removeprefix("torch.")
    return (
        f"{name:9s} density={density:6.4f} stored={statistics.median(stored[1:]) / 1e6:7.3f} MB "
        f"publish={statistics.median(publish_ms[1:]):6.1f} ms fetch={statistics.median(fetch_ms[1:]):6.1f} ms"
    )


def timed(into: list[float], call: Callable):
    """The call's result; appends its milliseconds."""
    started = time.perf_counter()
    result = call()
    into.append((time.perf_counter() - started) * 1e3)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case_dtype in (torch.float32, torch.bfloat16):
        for case_density in (0.0005, 0.02, 0.05, 0.3, 1.0):
            sys.stdout.write(measure(case_dtype, case_density) + "\n")
