"""Answers of an engine, and what the trainer makes of their tokens. For `engine_parity`."""

import asyncio
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer

from ostinato.infra.serving.engine.start import load_engine
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.decode.config import DecodingConfig, Precision
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.reinforcement.learning.report import Mismatch, measure_mismatch
from tests.benchmarks.decode_peers import smollm2_directory

ROOT = Path(__file__).parents[2]
PROMPT_TOKENS = 128
SCORED_ROWS = 4  # at once: SmolLM2's logits of one row are 50 MB


def read_prompts(checkpoint: Path, count: int) -> list[list[int]]:
    """Beginnings of files of this project, one each."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    prompts = []
    for path in sorted((ROOT / "tasks").rglob("*.py")):
        tokens = tokenizer.encode(path.read_text()).ids[:PROMPT_TOKENS]
        if len(tokens) == PROMPT_TOKENS:
            prompts.append(tokens)
    if len(prompts) < count:
        raise SystemExit(f"--answers {count}, wanted at most {len(prompts)}")
    return prompts[:count]


async def answer(
    checkpoint: Path, decoding: DecodingConfig, prompts: list[list[int]], new_tokens: int
) -> list[Generation]:
    """Answers at temperature 1, all side by side."""
    limit = PROMPT_TOKENS + new_tokens
    engine = load_engine(
        checkpoint, "compared", decoding, slots=len(prompts), max_context_tokens=limit
    )
    try:
        requests = [
            GenerateRequest(f"r{i}", f"s{i}", tuple(prompt), new_tokens, (), 1.0, seed=i)
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*map(engine.generate, requests))
    finally:
        engine.close()


def measure(checkpoint: Path, prompts: list[list[int]], answers: list[Generation]) -> Mismatch:
    """Trainer's log-probabilities of the answers beside the engine's."""
    loaded = load_checkpoint(checkpoint)
    trainer = build_trainer_model(loaded.spec, seed=0)
    trainer.import_weights(loaded.weights)
    rows = [prompt + list(a.token_ids) for prompt, a in zip(prompts, answers, strict=True)]
    tokens_BT = torch.tensor(rows)
    with torch.no_grad():
        scored = [trainer.token_logprobs(part_BT) for part_BT in tokens_BT.split(SCORED_ROWS)]
    logprobs_BT = torch.cat(scored)[:, PROMPT_TOKENS:].numpy()
    sampled_BT = np.stack([a.logprobs_T for a in answers])
    return measure_mismatch(logprobs_BT.reshape(-1), sampled_BT.reshape(-1))


def measure_engine(
    engine: Literal["local", "vllm"],
    precision: str,
    checkpoint: Path | None,
    count: int,
    new_tokens: int,
) -> Mismatch:
    """Mismatch over `count` answers of `new_tokens` each; of SmolLM2 without a checkpoint."""
    place = checkpoint or smollm2_directory()
    prompts = read_prompts(place, count)
    decoding = DecodingConfig(engine=engine, precision=Precision(precision))
    answers = asyncio.run(answer(place, decoding, prompts, new_tokens))
    return measure(place, prompts, answers)
