"""What drafting gains. Run: python -m tests.benchmarks.speculation [--quick] [--checkpoint
DIRECTORY]

With a checkpoint: its own draft layers on text it samples itself. Without one: nano-shaped weights
made so that the draft layers agree with the trunk to a chosen degree; their texts mean nothing,
their costs are real. Each row compares plain and speculative decoding of the same requests in one
run, by the decode thread's CPU time; the tokens must be equal. The last rows give the gate drafts
that never hold: it must stop drafting.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import thread_time

import numpy as np
import torch
from torch import Tensor

from models.checkpoint import load_checkpoint
from models.decode.engine import DecodeEngine, EngineConfig
from models.decode.protocol import GenerateRequest
from models.decode.weights import DecodeWeights, prepare_weights
from models.presets import NANO
from models.spec import ModelSpec
from tests.fakes.tiny_model import random_weights

SPEEDUP_TARGET = 1.8
GATE_TARGET = 0.97
DEPTH = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Plain against speculative decoding of the same requests."""

    name: str
    batch: int
    temperature: float
    speedup_ratio: float
    tokens_per_forward: float
    acceptance: list[float]

    def line(self) -> str:
        """One line of the table."""
        shares = " / ".join(f"{share:.2f}" for share in self.acceptance)
        return (
            f"{self.name:12s} {self.batch:5d} {self.temperature:11.1f} {self.speedup_ratio:8.2f}x "
            f"{self.tokens_per_forward:14.2f}   {shares}"
        )


def predictable_weights(disagreement: float) -> dict[str, Tensor]:
    """A trunk that mostly repeats its input, and draft layers that see it through noise of the
    given scale.
    """
    weights = random_weights(NANO)
    generator = torch.Generator().manual_seed(1)
    weights["model.embed_tokens.weight"] = 0.6 * torch.randn(
        NANO.vocab_size, NANO.hidden_size, generator=generator
    )
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "experts.down_proj")):
            weights[name] = 0.1 * tensor
        if name.endswith("norm.weight"):
            weights[name] = torch.ones_like(tensor)
    weights["model.norm.weight"] *= 0.09
    for depth in range(NANO.mtp_depth):
        prefix = f"model.mtp.{depth}"
        noise = disagreement * torch.randn(NANO.hidden_size, NANO.hidden_size, generator=generator)
        eye = torch.eye(NANO.hidden_size) + noise * NANO.hidden_size**-0.5
        weights[f"{prefix}.in_proj.weight"] = torch.cat([torch.zeros_like(eye), eye], dim=1)
        weights[f"{prefix}.down_proj.weight"] *= 0.0
        weights[f"{prefix}.norm.weight"] *= 0.09
    return weights


def run(
    engine: DecodeEngine, batch: int, new_tokens: int, temperature: float
) -> tuple[list[tuple[int, ...]], float]:
    """Decodes `batch` requests; returns their tokens and the CPU seconds of decode-only steps a
    token.
    """
    rng = np.random.default_rng(5)
    vocab = engine.spec.vocab_size
    before = (engine.statistics.decode_only_seconds, engine.statistics.decode_only_tokens)
    for index in range(batch):
        prompt = tuple(rng.integers(8, vocab, 32).tolist())
        engine.submit(
            GenerateRequest(
                f"r{index}", f"s{index}", prompt, new_tokens, (), temperature, seed=index
            )
        )
    finished = {}
    while engine.has_work:
        finished |= {generation.request_id: generation.token_ids for generation in engine.step()}
    for index in range(batch):
        engine.end_session(f"s{index}")
    seconds = engine.statistics.decode_only_seconds - before[0]
    tokens = engine.statistics.decode_only_tokens - before[1]
    return [finished[f"r{index}"] for index in range(batch)], seconds / tokens


def compare(
    name: str, spec: ModelSpec, weights: DecodeWeights, batch: int, temperature: float, repeats: int
) -> Row:
    """Alternates plain and speculative runs of the same requests and compares the medians."""
    new_tokens = min(256, spec.max_sequence_tokens - 40)
    plain = DecodeEngine(
        spec, weights, EngineConfig(slots=64, share_prefixes=False), clock=thread_time
    )
    config = EngineConfig(
        slots=64, share_prefixes=False, speculation_depth=DEPTH, speculation_max_batch=16
    )
    drafting = DecodeEngine(spec, weights, config, clock=thread_time)
    ratios = []
    for _ in range(repeats):
        plain_tokens, plain_seconds = run(plain, batch, new_tokens, temperature)
        drafted_tokens, drafted_seconds = run(drafting, batch, new_tokens, temperature)
        if plain_tokens != drafted_tokens:
            raise AssertionError(
                f"{name}: speculative tokens differ from plain ones at batch {batch}"
            )
        ratios.append(plain_seconds / drafted_seconds)
    totals = drafting.statistics
    return Row(
        name=name,
        batch=batch,
        temperature=temperature,
        speedup_ratio=float(np.median(ratios)),
        tokens_per_forward=totals.generated_tokens / max(totals.occupied_slot_steps, 1),
        acceptance=drafting.draft_acceptance(),
    )


def measure(
    weights_by_name: Mapping[str, tuple[ModelSpec, dict[str, Tensor]]], is_quick: bool
) -> list[Row]:
    """Every set of weights at batch 1, greedy and sampled, and at batch 8."""
    rows = []
    print(
        f"{'draft':12s} {'batch':>5} {'temperature':>11} {'speed-up':>9} {'tokens/forward':>14}"
        "   acceptance a depth"
    )
    for name, (spec, canonical) in weights_by_name.items():
        weights = prepare_weights(spec, canonical, 0)
        for batch, temperature in ((1, 0.0), (1, 1.0), (8, 1.0)):
            rows.append(compare(name, spec, weights, batch, temperature, 2 if is_quick else 7))
            print(rows[-1].line(), flush=True)
    return rows


def main() -> None:
    """Prints the table and one JSON line."""
    parser = argparse.ArgumentParser(description="speculative decoding against plain decoding")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint directory with draft layers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if arguments.checkpoint is not None:
        checkpoint = load_checkpoint(arguments.checkpoint)
        cases = {"checkpoint": (checkpoint.spec, checkpoint.weights)}
    else:
        cases = {
            f"synthetic {noise:g}": (NANO, predictable_weights(noise))
            for noise in ((0.5,) if arguments.quick else (0.2, 0.5, 1.0))
        }
    spec, canonical = next(iter(cases.values()))
    useless = {
        name: torch.randn_like(tensor) * 0.1
        if ".mtp." in name and not name.endswith("norm.weight")
        else tensor
        for name, tensor in canonical.items()
    }
    rows = measure(cases | {"useless": (spec, useless)}, arguments.quick)
    figures = {
        f"{row.name.replace(' ', '_')}_b{row.batch}_t{row.temperature:g}_{field}": round(value, 3)
        for row in rows
        for field, value in (
            ("speedup_ratio", row.speedup_ratio),
            ("tokens_per_forward", row.tokens_per_forward),
        )
    }
    best = max(row.speedup_ratio for row in rows if row.batch == 1 and row.name != "useless")
    worst = min(row.speedup_ratio for row in rows)
    figures |= {"best_b1_speedup_ratio": round(best, 3), "worst_speedup_ratio": round(worst, 3)}
    targets = {"best_b1_speedup_ratio": SPEEDUP_TARGET, "worst_speedup_ratio": GATE_TARGET}
    is_met = best >= SPEEDUP_TARGET and worst >= GATE_TARGET
    print(
        json.dumps({"name": "speculation", "figures": figures, "targets": targets, "met": is_met})
    )


if __name__ == "__main__":
    main()
