"""How fast versions travel from trainer to engine. Run: python -m tests.benchmarks.weight_chain [--quick] [--home DIR]

Five tables: publish and fetch by density at nano's size; coding against zstandard alone on the same
buffer of weights (same level, same threads); bytes of a delta at real RL updates (two successive
versions of the run in --home, each moved by its own Adam step scaled to the learning rate named;
without --home random weights of nano's shape and normal steps); the pause of a swap in decode
steps; and a curve over sizes with its extrapolation to a trillion parameters. Rates are wall time,
best of several, so run it on an idle machine.
"""

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
import zstandard

from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.local import LocalEngine
from ostinato.infra.serving.weights.codec import (
    COMPRESSION_LEVEL,
    THREADS,
    decode_payload,
    difference,
    encode_payload,
    tensor_bits,
    whole,
)
from ostinato.infra.serving.weights.manifest import list_versions
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from ostinato.models.decode.engine import EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from tests.fakes.nano_spec import NANO
from tests.fakes.tiny_model import random_weights

Weights = dict[str, torch.Tensor]

NANO_ELEMENTS = 2_000_000
RL_RATES = (3e-4, 1e-5, 3e-6, 1e-6, 3e-7)  # nano's own, then those of large models
TARGET_RATE = 1e-6
CODING_DENSITY = 0.01
TRILLION = 1_000_000_000_000
RANKS = 512
UPLINK_BYTES_PER_SECOND = 1e9  # of one rank, assumed
TARGETS = {
    "encode_delta_over_zstd_ratio": 0.5,
    "apply_delta_over_zstd_ratio": 0.5,
    "encode_anchor_over_zstd_ratio": 0.5,
    "apply_anchor_over_zstd_ratio": 0.5,
    "delta_share_of_bf16": 0.02,
    "swap_pause_decode_steps": 2.0,
}


def make_weights(elements: int, tensors: int, dtype: torch.dtype, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    each = elements // tensors
    return {
        f"layer.{index}": torch.randn(each, generator=generator).mul_(0.02).to(dtype)
        for index in range(tensors)
    }


def move_in_place(weights: Weights, density: float, seed: int) -> None:
    """One bit pattern further at random places, as a small update does to bf16."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        count = int(tensor.numel() * density)
        places = torch.randint(tensor.numel(), (count,), generator=generator)
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        bits[places] += 1


def seconds_of(call: Callable[[], object], repeats: int) -> float:
    """The best of several."""
    best = float("inf")
    for _ in range(repeats):
        gc.collect()
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def density_table(steps: int) -> None:
    """Publish and fetch at nano's size, through a local object store."""
    print(f"{'dtype':9s} {'density':>8s} {'stored MB':>10s} {'publish ms':>11s} {'fetch ms':>9s}")
    for dtype in (torch.float32, torch.bfloat16):
        for density in (0.0005, 0.02, 0.05, 0.3, 1.0):
            weights = make_weights(NANO_ELEMENTS, 60, dtype)
            publish, fetch, stored = publish_and_fetch(weights, density, steps)
            name = str(dtype).removeprefix("torch.")
            print(
                f"{name:9s} {density:8.4f} {stored / 1e6:10.3f} {publish * 1e3:11.1f} {fetch * 1e3:9.1f}"
            )


def publish_and_fetch(weights: Weights, density: float, steps: int) -> tuple[float, float, float]:
    """Median seconds to publish and to fetch, and bytes stored, of the steps after the first version."""
    with tempfile.TemporaryDirectory() as directory:
        store = ObjectStore.from_url(f"file://{directory}")
        publisher = ChainPublisher(store, "benchmark", keep_versions=4)
        subscriber = ChainSubscriber(store, "benchmark")
        publisher.publish(0, weights)
        subscriber.fetch(0)
        publish, fetch, stored = [], [], []
        for version in range(1, steps + 1):
            move_in_place(weights, density, version)
            started = time.perf_counter()
            manifest = publisher.publish(version, weights)
            publish.append(time.perf_counter() - started)
            fetch.append(seconds_of(lambda v=version: subscriber.fetch(v), 1))
            stored.append(manifest.stored_bytes)
    return statistics.median(publish), statistics.median(fetch), statistics.median(stored)


def coding_ratios(elements: int, repeats: int) -> dict[str, float]:
    """Throughput of coding over that of zstandard alone, both counted in bytes of weights."""
    base = make_weights(elements, 16, torch.bfloat16)
    target = {name: tensor.clone() for name, tensor in base.items()}
    move_in_place(target, CODING_DENSITY, 1)
    raw = b"".join(tensor_bits(tensor).tobytes() for tensor in target.values())
    compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, threads=THREADS)
    packed = compressor.compress(raw)
    delta = encode_payload(difference(base, target))
    anchor = encode_payload(whole(target))
    zstd_in = seconds_of(lambda: compressor.compress(raw), repeats)
    zstd_out = seconds_of(lambda: zstandard.ZstdDecompressor().decompress(packed), repeats)
    times = {
        "encode_delta": seconds_of(lambda: encode_payload(difference(base, target)), repeats),
        "apply_delta": seconds_of(lambda: decode_payload(delta, base, 1 << 30), repeats),
        "encode_anchor": seconds_of(lambda: encode_payload(whole(target)), repeats),
        "apply_anchor": seconds_of(lambda: decode_payload(anchor, {}, 1 << 30), repeats),
    }
    megabytes = len(raw) / 1e6
    print(f"zstd          {megabytes / zstd_in:8.0f} MB/s in {megabytes / zstd_out:8.0f} MB/s out")
    ratios = {}
    for name, seconds in times.items():
        reference = zstd_in if name.startswith("encode") else zstd_out
        ratios[f"{name}_over_zstd_ratio"] = reference / seconds
        print(f"{name:13s} {megabytes / seconds:8.0f} MB/s, {reference / seconds:5.2f} x zstd")
    return ratios


def real_update(home: Path | None, learning_rate: float) -> tuple[Weights, Weights, str]:
    """Weights in float32 and a step of Adam per unit of learning rate."""
    if home is None:
        weights = random_weights(NANO)
        generator = torch.Generator().manual_seed(1)
        step = {name: torch.randn(t.shape, generator=generator) for name, t in weights.items()}
        return weights, step, "random weights of nano's shape, normal steps"
    store = ObjectStore.from_url(f"file://{home.resolve()}/objects")
    chains = sorted(
        key.split("/")[1] for key in store.list("chains/") if key.endswith("manifest.json")
    )
    chain = next(name for name in reversed(chains) if "reinforced" in name)
    versions = list_versions(store, chain)[-2:]
    before, after = (ChainSubscriber(store, chain).fetch(version) for version in versions)
    step = {name: (after[name] - tensor) / learning_rate for name, tensor in before.items()}
    return before, step, f"{home.name}: versions {versions[0]} and {versions[1]} of {chain}"


def delta_shares(home: Path | None, learning_rate: float) -> float:
    """Stored bytes of a delta over the bytes of all weights in bf16, at TARGET_RATE."""
    weights, step, source = real_update(home, learning_rate)
    elements = sum(tensor.numel() for tensor in weights.values())
    print(f"delta after one step, {source}; {elements:,} elements")
    print(f"{'rate':>8s} {'changed':>9s} {'stored':>9s} {'share of bf16':>14s}")
    result = float("nan")
    before = {name: tensor.bfloat16() for name, tensor in weights.items()}
    for rate in RL_RATES:
        after = {name: (t + rate * step[name]).bfloat16() for name, t in weights.items()}
        changes = difference(before, after)
        stored = len(encode_payload(changes))
        share = stored / (2 * elements)
        print(f"{rate:8.0e} {changes.changed_elements / elements:9.2%} {stored:9,d} {share:14.2%}")
        if rate == TARGET_RATE:
            result = share
    return result


async def swap_pause(swaps: int) -> dict[str, float]:
    """The longest halt of decoding around a swap, in median decode steps (batch of 16)."""
    engine = LocalEngine(NANO, random_weights(NANO), 0, EngineConfig(slots=16))
    rng = np.random.default_rng(0)
    stamps: list[float] = []

    async def watch() -> None:  # the loop turns a few times between two steps
        while True:
            stamps.append(time.perf_counter())
            await asyncio.sleep(0)

    def request(index: int) -> GenerateRequest:
        prompt = tuple(rng.integers(0, NANO.vocab_size, 64).tolist())
        return GenerateRequest(f"r{index}", f"s{index}", prompt, 400, (), seed=index)

    await engine.generate(request(16))  # loads code that would stand among the gaps
    running = [asyncio.create_task(engine.generate(request(index))) for index in range(16)]
    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.3)
    pauses, halts, prepared, versions = [], [], [], [random_weights(NANO, seed) for seed in (1, 2)]
    for version in range(1, swaps + 1):
        first = len(stamps)
        report = await engine.swap_weights(versions[version % 2], version)
        await asyncio.sleep(0.02)
        pauses.append(report.pause_seconds)
        prepared.append(report.prepare_seconds)
        halts.append(float(np.diff(stamps[first - 1 :]).max()))
    control = []  # the longest gap of as many stretches of the same length without a swap
    for _ in range(swaps):
        first = len(stamps)
        await asyncio.sleep(0.02 + statistics.median(prepared))
        control.append(float(np.diff(stamps[first - 1 :]).max()))
    watching.cancel()
    for task in running:
        task.cancel()
    await asyncio.gather(watching, *running, return_exceptions=True)
    engine.close()
    gaps = np.diff(stamps)
    step = float(np.median(gaps[gaps > gaps.max() / 20]))
    print(
        f"decode step {step * 1e3:.2f} ms; swap itself {statistics.median(pauses) * 1e6:.0f} us; longest gap "
        f"between steps while preparing and swapping: median {statistics.median(halts) / step:.2f} steps, "
        f"without a swap {statistics.median(control) / step:.2f}"
    )
    return {
        "swap_pause_decode_steps": max(pauses) / step,
        "swap_longest_gap_decode_steps": statistics.median(halts) / step,
        "no_swap_longest_gap_decode_steps": statistics.median(control) / step,
    }


def size_curve(sizes: list[int], density: float) -> dict[str, float]:
    """Publish and fetch of a delta by number of bf16 weights, and the line through them."""
    print(f"{'elements':>14s} {'stored MB':>10s} {'publish s':>10s} {'fetch s':>9s}")
    rows = []
    for elements in sizes:
        free = psutil.virtual_memory().available
        if 12 * elements + 3e9 > free:  # six copies of the weights at the worst moment
            print(f"{elements:14,d} left out: {free / 1e9:.1f} GB of memory are free")
            continue
        weights = make_weights(elements, 32, torch.bfloat16)
        publish, fetch, stored = publish_and_fetch(weights, density, 2 if elements > 1e8 else 4)
        rows.append((elements, publish, fetch, stored))
        print(f"{elements:14,d} {stored / 1e6:10.2f} {publish:10.3f} {fetch:9.3f}")
        del weights
        gc.collect()
    largest = rows[-1]
    publish_rate, fetch_rate = largest[0] / largest[1], largest[0] / largest[2]
    stored_ratio = largest[3] / (2 * largest[0])
    seconds = TRILLION / RANKS / publish_rate
    upload = stored_ratio * 2 * TRILLION / RANKS / UPLINK_BYTES_PER_SECOND
    print(
        f"1T weights over R ranks: publish = 1e12 / R / {publish_rate:.3g} a second + {stored_ratio:.4f} * 2e12 / R "
        f"/ uplink; R = {RANKS}, uplink {UPLINK_BYTES_PER_SECOND / 1e9:.0f} GB/s: "
        f"{seconds:.2f} + {upload:.2f} s; all deltas {stored_ratio * 2 * TRILLION / 1e9:.1f} GB; "
        f"fetch over R replicas' ranks alike at {fetch_rate:.3g} weights a second"
    )
    return {
        "curve_largest_elements": float(largest[0]),
        "publish_weights_per_second": publish_rate,
        "fetch_weights_per_second": fetch_rate,
        "trillion_publish_seconds": seconds + upload,
        "trillion_delta_gigabytes": stored_ratio * 2 * TRILLION / 1e9,
    }


def main() -> None:
    """Prints the tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small buffers, sizes to 30 M")
    parser.add_argument("--home", type=Path, default=None, help="of a run whose chain is read")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of the steps in --home")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    figures: dict[str, float] = {}
    density_table(3 if options.quick else 9)
    figures |= coding_ratios(30_000_000 if options.quick else 200_000_000, 3)
    figures["delta_share_of_bf16"] = delta_shares(options.home, options.learning_rate)
    figures |= asyncio.run(swap_pause(3 if options.quick else 8))
    sizes = [1_000_000, 10_000_000, 30_000_000]
    if not options.quick:
        sizes += [100_000_000, 300_000_000, 1_000_000_000]
    figures |= size_curve(sizes, CODING_DENSITY)
    met = {
        name: figures[name] >= target if name.endswith("zstd_ratio") else figures[name] <= target
        for name, target in TARGETS.items()
    }
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    print(
        json.dumps(
            {
                "name": "weight_chain",
                "figures": rounded,
                "targets": TARGETS,
                "met": all(met.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
