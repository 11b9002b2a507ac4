"""How fast one GPU decodes: captured graphs beside the same steps launched one operation at a time.

Run: python -m tests.benchmarks.decode_gpu [--quick]

Two shapes in bfloat16, random weights: the reference shape of decode_peers.py, where launches are
nearly all of the time, and one of 1.1 billion parameters. Batches of 1, 16 and 64 with 128 prompt
and 256 new tokens; graphs are captured by a first round that is not counted. Prints tokens a second
of steps that feed no prompt, and the pause of a weight swap. Without a CUDA device it says so and
measures nothing.
"""

import argparse
import json
from statistics import median
from time import perf_counter

import torch

from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.weights import DecodeWeights, Precision, prepare_weights
from ostinato.models.spec import ModelSpec
from tests.benchmarks.decode_peers import BATCHES, PROMPT_TOKENS, REFERENCE, generate
from tests.fakes.tiny_model import random_weights

LARGE = ModelSpec(
    vocab_size=32768,
    hidden_size=2048,
    num_layers=12,
    num_attention_heads=16,
    num_query_groups=4,
    head_dim=128,
    num_experts=16,
    experts_per_token=4,
    expert_hidden_size=768,
    max_sequence_tokens=512,
)
SHAPES = {"reference": REFERENCE, "large": LARGE}
TARGETS = {"reference_b1_graph_speedup": 1.0, "large_b1_graph_speedup": 1.0}


def make_prompts(spec: ModelSpec) -> list[list[int]]:
    """As many prompts as the largest batch."""
    generator = torch.Generator().manual_seed(0)
    shape = (max(BATCHES), PROMPT_TOKENS)
    return torch.randint(spec.vocab_size, shape, generator=generator).tolist()


def decode_rate(engine: DecodeEngine, prompts: list[list[int]], new_tokens: int) -> float:
    """Tokens a second of the steps that fed no prompt; the first of three rounds is not counted."""
    rates = []
    for _ in range(3):
        before = engine.statistics.snapshot()
        generate(engine, prompts, new_tokens)
        after = engine.statistics.snapshot()
        made = after["decode_only_tokens"] - before["decode_only_tokens"]
        rates.append(made / (after["decode_only_seconds"] - before["decode_only_seconds"]))
    return median(rates[1:])


def swap_milliseconds(engine: DecodeEngine, weights: DecodeWeights) -> float:
    """Pause of a swap to weights that are on the device already."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = perf_counter()
        engine.swap_weights(weights)
        torch.cuda.synchronize()
        times.append(perf_counter() - started)
    return median(times) * 1e3


def measure_shape(name: str, new_tokens: int) -> dict[str, float]:
    """Both kinds of launches at every batch size."""
    spec, figures = SHAPES[name], {}
    weights = prepare_weights(spec, random_weights(spec), 0, Precision.BF16, device="cuda")
    prompts = make_prompts(spec)
    rates: dict[tuple[str, int], float] = {}
    for kind, has_graphs in (("launches", False), ("graph", True)):
        config = EngineConfig(
            slots=max(BATCHES),
            share_prefixes=False,
            precision=Precision.BF16,
            device="cuda",
            cuda_graphs=has_graphs,
        )
        engine = DecodeEngine(spec, weights, config)
        for batch in BATCHES:
            rates[kind, batch] = decode_rate(engine, prompts[:batch], new_tokens)
            figures[f"{name}_b{batch}_{kind}_tokens_per_second"] = rates[kind, batch]
        if has_graphs:
            figures[f"{name}_swap_milliseconds"] = swap_milliseconds(engine, weights)
    for batch in BATCHES:
        speedup = rates["graph", batch] / rates["launches", batch]
        figures[f"{name}_b{batch}_graph_speedup"] = speedup
        print(
            f"{name:10s} {batch:5d} {rates['launches', batch]:11.0f} {rates['graph', batch]:11.0f} "
            f"{speedup:8.2f}x",
            flush=True,
        )
    return figures


def main() -> None:
    """Prints the table and one JSON line."""
    parser = argparse.ArgumentParser(description="decode rates of one GPU")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    if torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(f"{'shape':10s} {'batch':>5} {'launches/s':>11} {'graph/s':>11} {'speed-up':>9}")
        for name in SHAPES:
            figures |= measure_shape(name, 32 if arguments.quick else 256)
    else:
        print("decode_gpu: left out, torch sees no CUDA device")
    targets = {name: target for name, target in TARGETS.items() if name in figures}
    met = bool(targets) and all(figures[name] >= target for name, target in targets.items())
    rounded = {name: round(value, 4) for name, value in figures.items()}
    print(json.dumps({"name": "decode_gpu", "figures": rounded, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
