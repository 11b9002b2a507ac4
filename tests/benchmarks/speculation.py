"""What drafting gains. Run: python -m tests.benchmarks.speculation [--quick] [--checkpoint
DIRECTORY [--rollouts DIRECTORY]]

With a checkpoint: its own draft layers, on the turns of recorded agents where rollouts are given,
else on text it samples itself. Without one: nano-shaped weights made so that the draft layers agree
with the trunk to a chosen degree; their texts mean nothing, their costs are real. Each row compares
plain and speculative decoding (draft layers and copies from the context, chosen by the gate) of the
same requests in one run by the same engine, by the decode thread's CPU time; the tokens must be
equal. Eager steps are dominated by what torch spends on each operation, so drafts gain much there;
compiled steps are several times faster and leave less to gain. The last rows give the gate drafts
that never hold: it must stop drafting. The gate has settled before the comparison begins; its later
probes are in it.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from time import thread_time

import numpy as np
import torch
from torch import Tensor

from models.checkpoint import load_checkpoint
from models.decode.engine import DecodeEngine, EngineConfig
from models.decode.protocol import GenerateRequest
from models.decode.weights import prepare_weights
from models.presets import NANO
from models.rendering import Renderer
from models.spec import ModelSpec
from tests.benchmarks.agent_turns import load_turns
from tests.fakes.tiny_model import random_weights

SPEEDUP_TARGET = 1.8
GATE_TARGET = 0.97
SETTLING_TOKENS = 12_000  # decoded before the comparison, so that the gate has seen every choice
DEPTH = 2
LOOKUP_TOKENS = 4
_REQUEST_TOKENS = 256  # sampled a request where no recorded turn says when to stop


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what it is asked."""

    name: str
    spec: ModelSpec
    canonical: dict[str, Tensor]
    prompts: list[tuple[int, ...]]
    stop_token_ids: tuple[int, ...] = ()

    def requests(self, temperature: float) -> list[GenerateRequest]:
        """One request a prompt, each a conversation of its own."""
        longest = self.spec.max_sequence_tokens
        return [
            GenerateRequest(
                f"r{index}",
                f"s{index}",
                prompt,
                min(_REQUEST_TOKENS, longest - len(prompt)),
                self.stop_token_ids,
                temperature,
                seed=index,
            )
            for index, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True, slots=True)
class Row:
    """Plain against speculative decoding of the same requests."""

    name: str
    engine: str
    batch: int
    temperature: float
    plain_tokens_per_second: float
    speedup_ratio: float
    tokens_per_forward: float
    acceptance: list[float]

    def line(self) -> str:
        """One line of the table."""
        shares = " / ".join(f"{share:.2f}" for share in self.acceptance)
        return (
            f"{self.name:12s} {self.engine:7s} {self.batch:5d} {self.temperature:11.1f} "
            f"{self.plain_tokens_per_second:8.0f} {self.speedup_ratio:8.2f}x "
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
    engine: DecodeEngine, batch: int, requests: list[GenerateRequest]
) -> tuple[list[tuple[int, ...]], float]:
    """Decodes requests, `batch` at a time; returns their tokens and the CPU seconds of decode-only
    steps a token.
    """
    before = (engine.statistics.decode_only_seconds, engine.statistics.decode_only_tokens)
    finished = {}
    for first in range(0, len(requests), batch):
        for request in requests[first : first + batch]:
            engine.submit(request)
        while engine.has_work:
            finished |= {one.request_id: one.token_ids for one in engine.step()}
    for request in requests:
        engine.end_session(request.session_id)
    seconds = engine.statistics.decode_only_seconds - before[0]
    tokens = engine.statistics.decode_only_tokens - before[1]
    return [finished[request.request_id] for request in requests], seconds / tokens


def compare(case: Case, batch: int, temperature: float, repeats: int, *, is_native: bool) -> Row:
    """Alternates plain and speculative runs of the same requests and compares the medians."""
    weights = prepare_weights(case.spec, case.canonical, 0, native=is_native)
    config = EngineConfig(slots=16, share_prefixes=False, native=is_native)
    drafts = replace(
        config, speculation_depth=DEPTH, lookup_tokens=LOOKUP_TOKENS, speculation_max_batch=16
    )
    plain = DecodeEngine(case.spec, weights, config, clock=thread_time)
    drafting = DecodeEngine(case.spec, weights, drafts, clock=thread_time)
    requests = case.requests(temperature)
    ratios, plain_times = [], []
    run(plain, batch, requests[:batch])
    while drafting.statistics.generated_tokens < SETTLING_TOKENS:
        run(drafting, batch, requests)
    for _ in range(repeats):
        plain_tokens, plain_seconds = run(plain, batch, requests)
        drafted_tokens, drafted_seconds = run(drafting, batch, requests)
        if plain_tokens != drafted_tokens:
            raise AssertionError(
                f"{case.name}: speculative tokens differ from plain ones at batch {batch}"
            )
        ratios.append(plain_seconds / drafted_seconds)
        plain_times.append(plain_seconds)
    totals = drafting.statistics
    return Row(
        name=case.name,
        engine="native" if is_native else "eager",
        batch=batch,
        temperature=temperature,
        plain_tokens_per_second=1 / float(np.median(plain_times)),
        speedup_ratio=float(np.median(ratios)),
        tokens_per_forward=totals.generated_tokens / max(totals.occupied_slot_steps, 1),
        acceptance=drafting.draft_acceptance(),
    )


def measure(cases: list[Case], is_quick: bool) -> list[Row]:
    """Every case by both engines at batch 1, greedy and sampled, and at batch 8."""
    rows = []
    print(
        f"{'draft':12s} {'engine':7s} {'batch':>5} {'temperature':>11} {'plain/s':>8} "
        f"{'speed-up':>9} {'tokens/forward':>14}   acceptance a depth"
    )
    for case in cases:
        for is_native in (False, True):
            for batch, temperature in ((1, 0.0), (1, 1.0), (8, 1.0)):
                repeats = 2 if is_quick else 7
                rows.append(compare(case, batch, temperature, repeats, is_native=is_native))
                print(rows[-1].line(), flush=True)
    return rows


def random_prompts(spec: ModelSpec, count: int) -> list[tuple[int, ...]]:
    """Prompts of 32 tokens that mean nothing."""
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(8, spec.vocab_size, 32).tolist()) for _ in range(count)]


def make_cases(checkpoint: Path | None, rollouts: Path | None, is_quick: bool) -> list[Case]:
    """The models asked for, and the first one with draft layers that know nothing."""
    if checkpoint is None:
        prompts = random_prompts(NANO, 8)
        cases = [
            Case(f"synthetic {noise:g}", NANO, predictable_weights(noise), prompts)
            for noise in ((0.5,) if is_quick else (0.2, 0.5, 1.0))
        ]
    else:
        loaded = load_checkpoint(checkpoint)
        if rollouts is None:
            case = Case("sampled", loaded.spec, loaded.weights, random_prompts(loaded.spec, 8))
        else:
            turns = load_turns(rollouts, 32 if is_quick else 96)
            stops = Renderer.load(checkpoint).stop_token_ids
            case = Case("transcripts", loaded.spec, loaded.weights, turns, stops)
        cases = [case]
    useless = {
        name: torch.randn_like(tensor) * 0.1
        if ".mtp." in name and not name.endswith("norm.weight")
        else tensor
        for name, tensor in cases[0].canonical.items()
    }
    unrelated = random_prompts(cases[0].spec, 8)
    case = Case("useless", cases[0].spec, useless, unrelated)
    return [*cases, case]


def main() -> None:
    """Prints the table and one JSON line."""
    parser = argparse.ArgumentParser(description="speculative decoding against plain decoding")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint directory with draft layers")
    parser.add_argument("--rollouts", type=Path, help="recorded groups of a run with its tokenizer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    cases = make_cases(arguments.checkpoint, arguments.rollouts, arguments.quick)
    rows = measure(cases, arguments.quick)
    figures = {
        f"{row.engine}_{row.name.replace(' ', '_')}_b{row.batch}_t{row.temperature:g}_{field}": value
        for row in rows
        for field, value in (
            ("speedup_ratio", round(row.speedup_ratio, 3)),
            ("tokens_per_forward", round(row.tokens_per_forward, 3)),
            ("plain_tokens_per_second", round(row.plain_tokens_per_second)),
        )
    }
    useful = [row for row in rows if row.batch == 1 and row.name != "useless"]
    best = max(row.speedup_ratio for row in useful)
    worst = min(row.speedup_ratio for row in rows)
    fastest = max(row.speedup_ratio * row.plain_tokens_per_second for row in useful)
    figures |= {
        "best_b1_speedup_ratio": round(best, 3),
        "worst_speedup_ratio": round(worst, 3),
        "fastest_b1_tokens_per_second": round(fastest),
    }
    targets = {"best_b1_speedup_ratio": SPEEDUP_TARGET, "worst_speedup_ratio": GATE_TARGET}
    is_met = best >= SPEEDUP_TARGET and worst >= GATE_TARGET
    print(
        json.dumps({"name": "speculation", "figures": figures, "targets": targets, "met": is_met})
    )


if __name__ == "__main__":
    main()
