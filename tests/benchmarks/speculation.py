"""What drafting gains. Run: python -m tests.benchmarks.speculation [--quick] [--checkpoint
DIRECTORY [--rollouts DIRECTORY]]

With a checkpoint: its own draft layers, on the turns of recorded agents where rollouts are given,
else on text it samples itself. Without one: nano-shaped weights made so that the draft layers agree
with the trunk to a chosen degree; their texts mean nothing, their costs are real. Each row compares
plain and speculative decoding (draft layers, copies from the context and from earlier answers, chosen
by the gate) of the same requests by one engine in one run, by the decode thread's CPU time; the
tokens must be equal. Before that the engine drafts for other requests: of recorded agents those of
earlier groups, without the problems that are measured. The last rows sample noise, with draft layers
that know nothing: no draft holds, and little may be lost.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from time import thread_time

import numpy as np
import torch
from torch import Tensor

from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.decode.statistics import EngineStatistics
from ostinato.models.decode.weights import prepare_weights
from ostinato.models.rendering import Renderer
from ostinato.models.spec import ModelSpec
from tests.benchmarks.agent_turns import load_turns
from tests.fakes.nano_spec import NANO
from tests.fakes.tiny_model import random_weights

SPEEDUP_TARGET = 1.8
GATE_TARGET = 0.97
DEPTH = 2
LOOKUP_TOKENS = 7
_MEASURED_GROUPS, _SETTLING_GROUPS, _SETTLING_ATTEMPTS = 48, 64, 4
_ROUND_REQUESTS = 4  # answered in one way, then in the other
_TRIMMED_SHARE = 0.25  # of rounds at either end of their ratios, which something else disturbed
_NOISE_TEMPERATURE = 4.0  # at which nothing that is sampled can be foreseen
_REQUEST_TOKENS = 96  # sampled a request where no recorded turn says when to stop


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what it is asked."""

    name: str
    spec: ModelSpec
    canonical: dict[str, Tensor]
    settling: list[tuple[int, ...]]  # prompts answered before the comparison
    measured: list[tuple[int, ...]]
    stop_token_ids: tuple[int, ...] = ()
    settings: tuple[tuple[int, float], ...] = ((1, 0.0), (1, 1.0), (8, 1.0))  # batch, temperature

    def requests(
        self, prompts: list[tuple[int, ...]], temperature: float, first_seed: int
    ) -> list[GenerateRequest]:
        """One request per prompt, each a conversation of its own."""
        longest = self.spec.max_sequence_tokens
        return [
            GenerateRequest(
                f"r{seed}",
                f"s{seed}",
                prompt,
                min(_REQUEST_TOKENS, longest - len(prompt)),
                self.stop_token_ids,
                temperature,
                seed=seed,
            )
            for seed, prompt in enumerate(prompts, first_seed)
        ]


@dataclass(frozen=True, slots=True)
class Row:
    """Plain against speculative decoding of the same requests."""

    name: str
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
            f"{self.name:12s} {self.batch:5d} {self.temperature:11.1f} "
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


def run(engine: DecodeEngine, batch: int, requests: list[GenerateRequest]) -> list[tuple[int, ...]]:
    """Decodes requests, `batch` at a time; returns their tokens."""
    finished = {}
    for first in range(0, len(requests), batch):
        for request in requests[first : first + batch]:
            engine.submit(request)
        while engine.has_work:
            finished |= {one.request_id: one.token_ids for one in engine.step()}
    for request in requests:
        engine.end_session(request.session_id)
    return [finished[request.request_id] for request in requests]


def compare(case: Case, batch: int, temperature: float) -> Row:
    """Plain and speculative decoding of the same requests, a few at a time and by turns. One engine
    does both: two would differ by where their memory lies.
    """
    config = EngineConfig(
        slots=16,
        share_prefixes=False,
        draft_layers=DEPTH,
        lookup_tokens=LOOKUP_TOKENS,
        speculation_max_batch=16,
    )
    weights = prepare_weights(case.spec, case.canonical, 0)
    engine = DecodeEngine(case.spec, weights, config, clock=thread_time)
    settling = case.requests(case.settling, temperature, 0)
    run(engine, batch, settling)
    measured = case.requests(case.measured, temperature, len(settling))
    rounds = []
    for first in range(0, len(measured), max(_ROUND_REQUESTS, batch)):
        requests = measured[first : first + max(_ROUND_REQUESTS, batch)]
        answers, spent = {}, {}
        for is_drafting in (False, True) if len(rounds) % 2 else (True, False):
            engine.switch_speculation(on=is_drafting)
            before = replace(engine.statistics)
            answers[is_drafting] = run(engine, batch, requests)
            spent[is_drafting] = _spent(before, engine.statistics)
        if answers[False] != answers[True]:
            raise AssertionError(
                f"{case.name}: speculative tokens differ from plain ones at batch {batch}"
            )
        rounds.append([*spent[False], *spent[True]])
    plain_seconds, plain_tokens, _, seconds, tokens, forwards = _trimmed(np.array(rounds))
    return Row(
        name=case.name,
        batch=batch,
        temperature=temperature,
        plain_tokens_per_second=plain_tokens / plain_seconds,
        speedup_ratio=tokens / seconds * plain_seconds / plain_tokens,
        tokens_per_forward=tokens / forwards,
        acceptance=engine.draft_acceptance(),
    )


def _spent(before: EngineStatistics, after: EngineStatistics) -> tuple[float, float, float]:
    """Seconds and tokens of the steps that fed no prompt, and slots decoded in all steps."""
    return (
        after.decode_only_seconds - before.decode_only_seconds,
        after.decode_only_tokens - before.decode_only_tokens,
        after.occupied_slot_steps - before.occupied_slot_steps,
    )


def _trimmed(rounds_R6: np.ndarray) -> list[float]:
    """Sums over the rounds but those whose speed-up is among the largest or the smallest."""
    speedup_R = rounds_R6[:, 0] / rounds_R6[:, 3]
    cut = int(len(rounds_R6) * _TRIMMED_SHARE)
    kept = np.argsort(speedup_R)[cut : len(rounds_R6) - cut]
    return rounds_R6[kept].sum(axis=0).tolist()


def measure(cases: list[Case]) -> list[Row]:
    """Every case."""
    rows = []
    print(
        f"{'draft':12s} {'batch':>5} {'temperature':>11} {'plain/s':>8} "
        f"{'speed-up':>9} {'tokens/forward':>14}   acceptance a depth"
    )
    for case in cases:
        for batch, temperature in case.settings:
            rows.append(compare(case, batch, temperature))
            print(rows[-1].line(), flush=True)
    return rows


def random_prompts(spec: ModelSpec, count: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of 32 tokens that mean nothing."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(8, spec.vocab_size, 32).tolist()) for _ in range(count)]


def make_cases(checkpoint: Path | None, rollouts: Path | None, is_quick: bool) -> list[Case]:
    """The models asked for, and the first one with draft layers that know nothing."""
    loaded = None if checkpoint is None else load_checkpoint(checkpoint)
    spec = NANO if loaded is None else loaded.spec
    settling = random_prompts(spec, 48 if is_quick else 160, seed=5)
    measured = random_prompts(spec, 32 if is_quick else 320, seed=6)
    if loaded is None:
        cases = [
            Case(f"synthetic {noise:g}", spec, predictable_weights(noise), settling, measured)
            for noise in ((0.5,) if is_quick else (0.2, 0.5, 1.0))
        ]
    elif checkpoint is None or rollouts is None:
        cases = [Case("sampled", spec, loaded.weights, settling, measured)]
    else:
        share = 4 if is_quick else 1
        count, before = _MEASURED_GROUPS // share, _SETTLING_GROUPS // share
        asked = load_turns(rollouts, slice(-count, None), 1)
        earlier = load_turns(rollouts, slice(-count - before, -count), _SETTLING_ATTEMPTS)
        cases = [
            Case(
                "transcripts",
                spec,
                loaded.weights,
                [turn for problem in sorted(earlier.keys() - asked) for turn in earlier[problem]],
                [turn for turns in asked.values() for turn in turns],
                Renderer.load(checkpoint).stop_token_ids,
            )
        ]
    useless = {
        name: torch.randn_like(tensor) * 0.1
        if ".mtp." in name and not name.endswith("norm.weight")
        else tensor
        for name, tensor in cases[0].canonical.items()
    }
    hot = ((1, _NOISE_TEMPERATURE), (8, _NOISE_TEMPERATURE))
    return [*cases, Case("useless", spec, useless, settling, measured, settings=hot)]


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
    rows = measure(cases)
    figures = {
        f"{row.name.replace(' ', '_')}_b{row.batch}_t{row.temperature:g}_{field}": value
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
