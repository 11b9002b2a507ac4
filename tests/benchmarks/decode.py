"""How fast one core decodes, and two beside other engines.

Run: python -m tests.benchmarks.decode [--quick] [--vllm-python PYTHON] [--model smollm2 [OPTIONS]]

With a Python that has vLLM's CPU build and transformers installed, our engine is compared with both
at the shape of decode_peers.py, in wall time; without one, that part is not run and its targets are
left out. Speed-ups are ours in float32 over the peer. With `--model smollm2` that comparison alone
is made, on SmolLM2-135M in float32, and with transformers and llama.cpp of this environment, or with
`--peers` alone. Rates beside peers are tokens made over all seconds, those for prompts included.

The rest has random weights of nano's shape: tokens a second of the decode thread's own CPU time
(equal to wall time on an idle machine, steady on a busy one); the wall column shows what this run
saw. The floor is the time of the matrix products alone, same shapes, same run. The agent row plays
many sessions of several short turns through `LocalEngine`, as rollouts do.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, thread_time

import numpy as np
import torch

from ostinato.infra.serving.engine.local import LocalEngine
from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.decode.weights import DecodeWeights, prepare_weights
from tests.benchmarks.decode_peers import BATCHES, compare_with_peers
from tests.fakes.nano_spec import NANO
from tests.fakes.tiny_model import random_weights

PROMPT_TOKENS = 128
NEW_TOKENS = {"reference": 256, "smollm2": 32}  # of each request beside peers
TARGETS = {
    "decode_b1_tokens_per_second": 600.0,
    "decode_b64_tokens_per_second": 6000.0,
    "request_overhead_milliseconds": 0.3,
    "reuse_first_token_ratio": 0.5,
    "vllm_b1_speedup": 2.5,
    "vllm_b16_speedup": 2.0,
    "vllm_b64_speedup": 1.5,
}


@dataclass(frozen=True, slots=True)
class Rates:
    """One batch size."""

    batch: int
    decode_per_second: float
    total_per_second: float
    wall_per_second: float
    prefill_per_second: float
    floor_ratio: float


def random_prompt(rng: np.random.Generator, tokens: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, NANO.vocab_size, tokens).tolist())


def measure_batch(weights: DecodeWeights, batch: int, new_tokens: int) -> Rates:
    """Decodes `batch` requests side by side."""
    rng = np.random.default_rng(batch)
    config = EngineConfig(slots=64, share_prefixes=False)
    engine = DecodeEngine(NANO, weights, config, clock=thread_time)
    for index in range(batch):
        prompt = random_prompt(rng, PROMPT_TOKENS)
        engine.submit(GenerateRequest(f"r{index}", f"s{index}", prompt, new_tokens, (), seed=index))
    wall_started = perf_counter()
    while engine.has_work:
        engine.step()
    wall_seconds = perf_counter() - wall_started
    totals = engine.statistics
    decode_rate = totals.decode_only_tokens / totals.decode_only_seconds
    prefill_seconds = totals.busy_seconds - totals.decode_only_seconds
    return Rates(
        batch=batch,
        decode_per_second=decode_rate,
        total_per_second=totals.generated_tokens / totals.busy_seconds,
        wall_per_second=totals.generated_tokens / wall_seconds,
        prefill_per_second=totals.prefill_tokens / prefill_seconds,
        floor_ratio=batch / decode_rate / floor_seconds(batch, PROMPT_TOKENS + new_tokens // 2),
    )


def floor_seconds(batch: int, context: int) -> float:
    """CPU seconds of one step's matrix products alone, best of several tries."""
    hidden = torch.randn(batch, NANO.hidden_size)
    qkv = torch.randn(NANO.query_size + 2 * NANO.key_value_size, NANO.hidden_size)
    output = torch.randn(NANO.hidden_size, NANO.query_size)
    up = torch.randn(2 * NANO.expert_hidden_size, NANO.hidden_size)
    down = torch.randn(NANO.hidden_size, NANO.expert_hidden_size)
    head = torch.randn(NANO.vocab_size, NANO.hidden_size)
    copies = batch * NANO.experts_per_token
    used = min(NANO.num_experts, copies)
    expert_rows = torch.randn(-(-copies // used), NANO.hidden_size)
    inner_rows = torch.randn(-(-copies // used), NANO.expert_hidden_size)
    groups = batch * NANO.num_query_groups
    per_group = NANO.num_attention_heads // NANO.num_query_groups
    query = torch.randn(groups, per_group, NANO.head_dim)
    keys = torch.randn(groups, NANO.head_dim, context)
    weights = torch.randn(groups, per_group, context)
    values = torch.randn(groups, context, NANO.head_dim)
    best = float("inf")
    for _ in range(20):
        started = thread_time()
        for _ in range(NANO.num_layers):
            hidden @ qkv.t()
            torch.bmm(query, keys)
            torch.bmm(weights, values)
            hidden @ output.t()
            for _ in range(used):
                expert_rows @ up.t()
                inner_rows @ down.t()
        hidden @ head.t()
        best = min(best, thread_time() - started)
    return best


def measure_reuse(weights: DecodeWeights) -> float:
    """CPU time to the first token of a later turn with 16 new tokens, over that of the whole
    context fed anew.
    """
    rng = np.random.default_rng(7)
    context = random_prompt(rng, 320)

    def first_token_seconds(warm: bool, repeats: int = 7) -> float:
        times = []
        for index in range(repeats):
            engine = DecodeEngine(NANO, weights, EngineConfig(slots=4), clock=thread_time)
            if warm:
                engine.submit(GenerateRequest("before", "s", context[:-16], 1, (), seed=index))
                while engine.has_work:
                    engine.step()
            engine.submit(GenerateRequest("turn", "s", context, 1, (), seed=index))
            started = thread_time()
            while engine.has_work:
                engine.step()
            times.append(thread_time() - started)
        return float(np.median(times))

    return first_token_seconds(warm=True) / first_token_seconds(warm=False)


async def measure_overhead(engine: LocalEngine, requests: int) -> float:
    """CPU milliseconds of this process per request beyond the decode steps themselves."""
    rng = np.random.default_rng(3)
    batch = [
        GenerateRequest(f"o{index}", f"o{index}", random_prompt(rng, 8), 1, (), seed=index)
        for index in range(requests)
    ]
    before, process_before = engine.statistics()["busy_seconds"], process_time()
    await asyncio.gather(*(engine.generate(request) for request in batch))
    outside = process_time() - process_before - (engine.statistics()["busy_seconds"] - before)
    return max(0.0, outside) / requests * 1e3


async def measure_agents(engine: LocalEngine, sessions: int, turns: int) -> tuple[float, float]:
    """Tokens per wall second and per CPU second of the process, over sessions of short turns."""
    generated = 0

    async def play(index: int) -> None:
        nonlocal generated
        rng = np.random.default_rng(index)
        context = random_prompt(rng, 60)
        for turn in range(turns):
            limit = int(rng.integers(10, 50))
            request = GenerateRequest(
                f"a{index}-{turn}", f"a{index}", context, limit, (), seed=index
            )
            generation = await engine.generate(request)
            generated += len(generation.token_ids)
            context = context + generation.token_ids + random_prompt(rng, int(rng.integers(10, 60)))
        await engine.end_session(f"a{index}")

    wall_started, process_started = perf_counter(), process_time()
    await asyncio.gather(*(play(index) for index in range(sessions)))
    return generated / (perf_counter() - wall_started), generated / (
        process_time() - process_started
    )


async def measure_service(weights_seed: int, is_quick: bool) -> dict[str, float]:
    """What callers of the thread see."""
    config = EngineConfig(slots=64)
    engine = LocalEngine(NANO, random_weights(NANO, weights_seed), 0, config, clock=thread_time)
    await measure_agents(engine, 8, 1)
    overhead = await measure_overhead(engine, 100 if is_quick else 500)
    wall, cpu = await measure_agents(engine, 32 if is_quick else 128, 4)
    report = await engine.swap_weights(random_weights(NANO, weights_seed + 1), 1)
    engine.close()
    return {
        "request_overhead_milliseconds": overhead,
        "agents_tokens_per_wall_second": wall,
        "agents_tokens_per_cpu_second": cpu,
        "swap_prepare_milliseconds": report.prepare_seconds * 1e3,
        "swap_pause_milliseconds": report.pause_seconds * 1e3,
    }


def measure_engines(is_quick: bool) -> dict[str, float]:
    """Decoding of nano's shape on one core."""
    figures: dict[str, float] = {}
    columns = ("decode/s", "total/s", "wall/s", "prefill/s", "x floor")
    print(f"{'batch':>5} " + " ".join(f"{column:>9}" for column in columns))
    weights = prepare_weights(NANO, random_weights(NANO), 0)
    started = perf_counter()
    measure_batch(weights, 4, 16)
    figures["start_seconds"] = perf_counter() - started
    for batch in (1, 16, 64):
        rates = measure_batch(weights, batch, 48 if is_quick else 256)
        print(
            f"{rates.batch:5d} {rates.decode_per_second:9.0f} "
            f"{rates.total_per_second:9.0f} {rates.wall_per_second:9.0f} "
            f"{rates.prefill_per_second:9.0f} {rates.floor_ratio:9.2f}",
            flush=True,
        )
        figures[f"decode_b{batch}_tokens_per_second"] = rates.decode_per_second
        figures[f"prefill_b{batch}_tokens_per_second"] = rates.prefill_per_second
        figures[f"decode_b{batch}_over_floor_ratio"] = rates.floor_ratio
    return figures


def measure_peers(
    peers: dict[str, Path],
    name: str,
    is_quick: bool,
    *,
    rounds: int | None = None,
    new_tokens: int | None = None,
    batches: Sequence[int] = BATCHES,
) -> dict[str, float]:
    """Speed-ups over the peers, and what each side made a second."""
    if not peers:
        print("peers: not run (no --vllm-python)")
        return {}
    figures: dict[str, float] = {}
    columns = ("ours/s", "bf16/s", "peer/s", "speed-up")
    print(f"{'peer':13s} {'batch':>5} " + " ".join(f"{column:>8}" for column in columns))
    with tempfile.TemporaryDirectory() as directory:
        for row in compare_with_peers(
            peers,
            name,
            Path(directory),
            new_tokens=new_tokens or NEW_TOKENS[name] // (4 if is_quick else 1),
            rounds=rounds or (2 if is_quick else 5),
            batches=batches,
        ):
            print(
                f"{row.peer:13s} {row.batch:5d} {row.our_tokens_per_second:8.0f} "
                f"{row.our_bf16_tokens_per_second:8.0f} {row.peer_tokens_per_second:8.0f} "
                f"{row.ratio:7.2f}x",
                flush=True,
            )
            figures[f"{row.peer}_b{row.batch}_speedup"] = row.ratio
            figures[f"{row.peer}_b{row.batch}_tokens_per_second"] = row.peer_tokens_per_second
            figures[f"beside_{row.peer}_b{row.batch}_tokens_per_second"] = row.our_tokens_per_second
            figures[f"beside_{row.peer}_b{row.batch}_bf16_tokens_per_second"] = (
                row.our_bf16_tokens_per_second
            )
    return figures


def main() -> None:
    """Prints the tables and one JSON line."""
    parser = argparse.ArgumentParser(description="decode rates")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--vllm-python", type=Path, help="has vLLM (CPU) and transformers")
    parser.add_argument("--model", choices=tuple(NEW_TOKENS), default="reference")
    alone = parser.add_argument_group("with --model smollm2")
    alone.add_argument("--peers", nargs="+", help="which ones")
    alone.add_argument("--rounds", type=int, help="of each batch size")
    alone.add_argument("--new-tokens", type=int, help="of each request")
    alone.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=BATCHES)
    arguments = parser.parse_args()
    if arguments.model != "smollm2" and (
        arguments.peers or arguments.rounds or arguments.new_tokens or arguments.batches != BATCHES
    ):
        parser.error("--peers, --rounds, --new-tokens and --batches want --model smollm2")
    peers: dict[str, Path] = {}
    if arguments.vllm_python is not None:
        peers["vllm"] = arguments.vllm_python
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if arguments.model == "smollm2":
        here = Path(sys.executable)
        peers |= {"transformers": here, "llama_cpp": here}
        for unknown in {*(arguments.peers or ())} - peers.keys():
            parser.error(
                f"--peers {unknown}, wanted some of {', '.join(peers)}; vllm: --vllm-python"
            )
        chosen = {kind: peers[kind] for kind in arguments.peers or peers}
        figures = measure_peers(
            chosen,
            arguments.model,
            arguments.quick,
            rounds=arguments.rounds,
            new_tokens=arguments.new_tokens,
            batches=arguments.batches,
        )
        print(json.dumps({"name": "decode smollm2", "figures": figures}))
        return
    if "vllm" in peers:
        peers["transformers"] = peers["vllm"]
    figures = measure_peers(peers, arguments.model, arguments.quick)
    figures |= measure_engines(arguments.quick)
    weights = prepare_weights(NANO, random_weights(NANO), 0)
    service = {"reuse_first_token_ratio": measure_reuse(weights)}
    service |= asyncio.run(measure_service(0, arguments.quick))
    for name, value in service.items():
        print(f"{name:36s} {value:10.3f}")
    figures |= service
    targets = {name: target for name, target in TARGETS.items() if name in figures}
    met = {
        name: figures[name] <= target
        if name.endswith(("milliseconds", "ratio"))
        else figures[name] >= target
        for name, target in targets.items()
    }
    rounded = {name: round(value, 4) for name, value in figures.items()}
    print(
        json.dumps(
            {"name": "decode", "figures": rounded, "targets": targets, "met": all(met.values())}
        )
    )


if __name__ == "__main__":
    main()
