"""Child entry that measures drafting: the same prompts decoded plainly, with draft layers, and with
draft layers and lookup, one after the other, at batch 1.

Answers are greedy and must be the same tokens in all ways. The lookup remembers earlier answers.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import EngineError
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.decode.config import EngineConfig, configure_engine
from ostinato.models.decode.engine import DecodeEngine, EngineStatistics
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.decode.weights import prepare_weights
from ostinato.models.rendering import load_renderer
from ostinato.tasks.pretraining.mtp.config import SpeculationRequest, SpeculationResult


def main(request: SpeculationRequest, workspace: Workspace) -> SpeculationResult:
    """Decodes every prompt in the three ways. Raises EngineError if an answer differs."""
    configure_logging()
    checkpoint = load_checkpoint(Path(request.checkpoint_directory))
    renderer = load_renderer(Path(request.checkpoint_directory))
    variants = engine_variants(request)
    weights = prepare_weights(checkpoint.spec, checkpoint.weights, 0, request.decoding.precision)
    plain, drafted, with_lookup = (
        DecodeEngine(checkpoint.spec, weights, config) for config in variants
    )
    prompts = answer_prompts(Path(request.corpus_directory), request.config.prompts)
    for engine in (plain, drafted, with_lookup):  # compiles and loads code before anything is timed
        _generate(engine, GenerateRequest("warm-up", "warm-up", tuple(prompts[0]), 32, ()))
        engine.statistics = EngineStatistics()
    for index, prompt in enumerate(prompts):
        fields: dict[str, Any] = {
            "session_id": f"s{index}",
            "token_ids": tuple(prompt),
            "max_new_tokens": request.config.max_new_tokens,
            "stop_token_ids": renderer.stop_token_ids,
            "temperature": 0.0,
        }
        answers = [
            _generate(engine, GenerateRequest(request_id=f"{index}", **fields)).token_ids
            for engine in (plain, drafted, with_lookup)
        ]
        if answers[1:] != [answers[0]] * 2:
            raise EngineError(
                f"prompt {index}: drafted answers {answers[1:]} differ from the plain one {answers[0]}"
            )
        workspace.progress.update(
            index + 1, len(prompts), "decoding plainly, with draft layers, with the lookup"
        )
    plain_rate, drafted_rate, lookup_rate = (
        engine.statistics.decode_only_tokens / engine.statistics.decode_only_seconds
        for engine in (plain, drafted, with_lookup)
    )
    return SpeculationResult(
        acceptance=drafted.statistics.accepted_tokens / max(1, drafted.statistics.drafted_tokens),
        acceptance_by_depth=tuple(drafted.draft_acceptance()),
        tokens_per_forward=drafted.statistics.generated_tokens
        / max(1, drafted.statistics.occupied_slot_steps),
        plain_tokens_per_second=plain_rate,
        drafted_tokens_per_second=drafted_rate,
        speed_up=drafted_rate / plain_rate,
        lookup_speed_up=lookup_rate / plain_rate,
        answers=len(prompts),
    )


def engine_variants(request: SpeculationRequest) -> list[EngineConfig]:
    """The recipe's engine without drafts, with draft layers in every step (so that acceptance
    covers all positions), and with layers and lookup as the engine's policy chooses.
    """
    config = request.config
    no_drafts: dict[str, int] = {"draft_layers": 0, "lookup_tokens": 0}
    drafts: tuple[dict[str, int], ...] = (
        {},
        {"draft_layers": config.depth, "always_drafts": True},
        {"draft_layers": config.depth, "lookup_tokens": config.lookup_tokens},
    )
    return [
        configure_engine(request.decoding, slots=1, share_prefixes=False, **no_drafts | chosen)
        for chosen in drafts
    ]


def answer_prompts(corpus_directory: Path, count: int) -> list[list[int]]:
    """Demonstrations cut before the model's second answer, which is an edit, not the fixed opening."""
    data = load_file(corpus_directory / "demonstrations.safetensors")
    tokens, mask, offsets = data["token_ids"], data["loss_mask"].astype(bool), data["offsets"]
    prompts: list[list[int]] = []
    for start, end in itertools.pairwise(offsets.tolist()):
        rises = np.flatnonzero(np.diff(mask[start:end].astype(np.int8)) == 1) + 1
        if len(rises) >= 2:
            prompts.append(tokens[start : start + rises[1]].tolist())
        if len(prompts) == count:
            break
    return prompts


def _generate(engine: DecodeEngine, request: GenerateRequest) -> Generation:
    engine.submit(request)
    while True:
        finished = engine.step()
        if finished:
            return finished[0]
