"""Our engine beside vLLM's CPU build, Hugging Face generate and llama.cpp: same weights, same prompts.

Two models: the reference shape with random weights, and SmolLM2-135M. Ours is one process a
core, each with its share of the prompts; the others get both cores in their own way. Rounds
alternate between the sides, so that a slow moment of the machine hits all; figures are medians.
Everyone decodes greedily and never stops early. Of the reference shape the peers run Qwen3-MoE with
the weights rounded to bfloat16 and multiply in it; ours runs the same rounded weights in float32 and
its own router (sigmoid instead of softmax: same cost, other tokens). SmolLM2 is float32 on all sides,
llama.cpp's KV cache apart, which is its default of half precision. Ours runs once more with matrices
stored in bfloat16 (`[decoding] precision = "bf16"`).
"""

import json
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import IO

import numpy as np
import torch

from ostinato.infra.platform.settings import load_settings
from ostinato.infra.serving.published_models import write_model_directory
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.decode.config import Precision
from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.decode.weights import prepare_weights
from ostinato.models.spec import ModelSpec
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.importing import import_model
from tests.fakes.small_spec import make_spec
from tests.fakes.tiny_model import random_weights

PROMPT_TOKENS = 128
BATCHES = (1, 16, 64)
PEER_SCRIPT = Path(__file__).with_name("peer_generate.py")
REFERENCE = make_spec(
    2048, 256, heads=(8, 2, 32), experts=(4, 2, 256), max_sequence_tokens=512, num_layers=4
)


@dataclass(frozen=True)
class ComparedModel:
    """What all sides run."""

    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    dtype: str  # of the peers' products
    export: Callable[[Path], object]  # writes the directory that the peers read


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of one batch size, measured in turn."""

    peer: str
    batch: int
    our_tokens_per_second: float
    our_bf16_tokens_per_second: float
    peer_tokens_per_second: float

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.our_tokens_per_second / self.peer_tokens_per_second


def rounded_weights() -> dict[str, torch.Tensor]:
    """Weights that bfloat16 holds exactly."""
    return {name: t.bfloat16().float() for name, t in random_weights(REFERENCE).items()}


def reference_model() -> ComparedModel:
    """Random weights at the reference shape."""
    weights = rounded_weights()
    # llama.cpp knows Qwen3-MoE: the same shapes and cost, another router
    shape = REFERENCE.model_copy(update={"router_score": "softmax"})

    def export(directory: Path) -> None:
        write_model_directory(directory, shape, weights.__getitem__, torch.bfloat16)

    return ComparedModel(REFERENCE, weights, "bfloat16", export)


def smollm2_directory() -> Path:
    """Checkpoint of SmolLM2-135M, fetched once into the cache of this machine."""
    cache = load_settings().cache_directory
    place = cache / "benchmarks" / "smollm2"
    if not place.exists():
        import_model("smollm2", place, cache / "models")
    return place


def smollm2_model() -> ComparedModel:
    """SmolLM2-135M."""
    place = smollm2_directory()
    checkpoint = load_checkpoint(place)

    def export(directory: Path) -> None:
        export_model(place, directory, name="x", lineage=[], dtype="float32", with_gguf=True)

    return ComparedModel(checkpoint.spec, checkpoint.weights, "float32", export)


MODELS = {"reference": reference_model, "smollm2": smollm2_model}


def make_prompts(vocab_size: int) -> list[list[int]]:
    """As many prompts as the largest batch."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (max(BATCHES), PROMPT_TOKENS)).tolist()


def generate(engine: DecodeEngine, prompts: list[list[int]], new_tokens: int) -> int:
    """Decodes all prompts side by side; returns the tokens made."""
    for index, prompt in enumerate(prompts):
        request = GenerateRequest(
            f"r{index}", f"s{index}", tuple(prompt), new_tokens, (), temperature=0.0
        )
        engine.submit(request)
    made = 0
    while engine.has_work:
        made += sum(len(generation.token_ids) for generation in engine.step())
    for index in range(len(prompts)):
        engine.end_session(f"s{index}")
    return made


def serve_engine(connection: Connection, name: str, new_tokens: int, precision: Precision) -> None:
    """One engine process: prompts in, tokens made out; None ends it."""
    torch.set_num_threads(1)
    model = MODELS[name]()
    weights = prepare_weights(model.spec, model.weights, 0, precision)
    engine = DecodeEngine(model.spec, weights, EngineConfig(slots=64, share_prefixes=False))
    generate(engine, make_prompts(model.spec.vocab_size)[:2], 4)
    connection.send("ready")
    while (prompts := connection.recv()) is not None:
        connection.send(generate(engine, prompts, new_tokens))


@contextmanager
def our_engines(
    processes: int, name: str, new_tokens: int, precision: Precision
) -> Iterator[list[Connection]]:
    """Engine processes, ended with the block."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(processes)]
    workers = [
        context.Process(target=serve_engine, args=(theirs, name, new_tokens, precision))
        for _, theirs in pairs
    ]
    for worker in workers:
        worker.start()
    try:
        for ours, _ in pairs:
            ours.recv()
        yield [ours for ours, _ in pairs]
    finally:
        for (ours, _), worker in zip(pairs, workers, strict=True):
            ours.send(None)
            worker.join()


def time_ours(engines: list[Connection], prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds until all shares are done; a share is every n-th prompt."""
    used = engines[: len(prompts)]
    started = perf_counter()
    for index, engine in enumerate(used):
        engine.send(prompts[index :: len(used)])
    made = sum(engine.recv() for engine in used)
    seconds = perf_counter() - started
    if made != len(prompts) * new_tokens:
        raise AssertionError(f"made {made} tokens, wanted {len(prompts) * new_tokens}")
    return seconds


@contextmanager
def peer_process(
    python: Path, kind: str, dtype: str, directory: Path, new_tokens: int
) -> Iterator[subprocess.Popen[str]]:
    """A peer that has loaded the model."""
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
    }
    command = [
        str(python),
        str(PEER_SCRIPT),
        kind,
        dtype,
        str(directory / "model"),
        str(directory / "prompts.json"),
        str(new_tokens),
    ]
    log = (directory / f"{kind}.log").open("w")
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
    )
    try:
        if next_line(process.stdout) != "ready":
            raise RuntimeError(f"{kind} did not start, see {directory}/{kind}.log")
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def next_line(stream: IO[str] | None) -> str:
    """What the peer says next; its libraries' own output is passed over."""
    assert stream is not None
    for line in stream:
        if line.startswith("@"):
            return line[1:].strip()
    return ""


def time_peer(process: subprocess.Popen[str], batch: int) -> float:
    """Seconds of one generation by a peer."""
    assert process.stdin is not None
    process.stdin.write(f"{batch}\n")
    process.stdin.flush()
    return float(json.loads(next_line(process.stdout))["seconds"])


def compare_with_peers(
    peers: dict[str, Path],
    name: str,
    directory: Path,
    *,
    new_tokens: int,
    rounds: int,
    batches: Sequence[int] = BATCHES,
) -> Iterator[Comparison]:
    """Ours and each peer, by the Python that it runs in, in turn, `rounds` times a batch size."""
    model = MODELS[name]()
    prompts = make_prompts(model.spec.vocab_size)
    model.export(directory / "model")
    (directory / "prompts.json").write_text(json.dumps(prompts))
    for kind, python in peers.items():
        with (
            our_engines(2, name, new_tokens, Precision.FP32) as engines,
            our_engines(2, name, new_tokens, Precision.BF16) as coarse_engines,
            peer_process(python, kind, model.dtype, directory, new_tokens) as peer,
        ):
            for batch in batches:
                time_peer(peer, batch)  # its graphs of this size are compiled now
                time_ours(engines, prompts[:batch], new_tokens)
                time_ours(coarse_engines, prompts[:batch], new_tokens)
                ours, coarse, theirs = [], [], []
                for _ in range(rounds):
                    ours.append(time_ours(engines, prompts[:batch], new_tokens))
                    coarse.append(time_ours(coarse_engines, prompts[:batch], new_tokens))
                    theirs.append(time_peer(peer, batch))
                made = batch * new_tokens
                rates = [made / median(seconds) for seconds in (ours, coarse, theirs)]
                yield Comparison(kind, batch, *rates)
