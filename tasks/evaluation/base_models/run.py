"""Child entry of comparing base models: all measures of one checkpoint."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.infra.serving.engine.start import load_engine
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.device import on_device
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.rendering import load_renderer
from ostinato.models.rendering.renderer import Renderer
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.evaluation.base_models import humaneval, state_tracking
from ostinato.tasks.evaluation.base_models.completion import Completer, Prompt
from ostinato.tasks.evaluation.base_models.config import (
    BaseMeasures,
    BaseSelectionRequest,
    CodebaseLoss,
    CodeKnowledge,
    StateTracking,
)

# Fits prompts and answers of both tasks; a longer context would only cost memory.
_CONTEXT_TOKENS = 2048


def main(request: BaseSelectionRequest, workspace: Workspace) -> BaseMeasures:
    """Measures the loss, then completions through the engine that agents use."""
    configure_logging()
    started_at = time.monotonic()
    directory = Path(request.checkpoint_directory)
    with boundary(ConfigError, f"checkpoint {directory}"):
        renderer, checkpoint = load_renderer(directory), load_checkpoint(directory)
    texts = _read_sources(request)
    model = build_trainer_model(checkpoint.spec).eval()
    model.import_weights(checkpoint.weights)
    whole = "\n".join(texts)
    token_ids = renderer.encode_content(whole)
    codebase = measure_codebase(
        model,
        token_ids,
        len(whole.encode()),
        min(request.config.window_tokens, checkpoint.spec.max_sequence_tokens),
        lambda done: workspace.progress.update(done, len(token_ids), "tokens of source"),
    )
    knowledge, tracking, tokens_per_second = asyncio.run(
        _complete(request, renderer, checkpoint.spec, texts, workspace)
    )
    return BaseMeasures(
        parameters=num_parameters(checkpoint.spec),
        codebase=codebase,
        knowledge=knowledge,
        tracking=tracking,
        tokens_per_second=tokens_per_second,
        wall_seconds=time.monotonic() - started_at,
    )


def _read_sources(request: BaseSelectionRequest) -> list[str]:
    """Texts of the code base up to its limit of bytes."""
    texts, left_bytes = [], request.config.codebase_bytes
    for source in request.sources:
        content = Path(source).read_bytes()[:left_bytes]
        texts.append(content.decode("utf-8", "ignore"))
        left_bytes -= len(content)
        if left_bytes <= 0:
            break
    return texts


async def _complete(
    request: BaseSelectionRequest,
    renderer: Renderer,
    spec: ModelSpec,
    texts: list[str],
    workspace: Workspace,
) -> tuple[CodeKnowledge, StateTracking, float]:
    """Results of both tasks, and the tokens per second of the first."""
    config = request.config
    functions = humaneval.read_functions(Path(request.humaneval), config.humaneval_problems)
    files = state_tracking.make_files(
        texts,
        count=config.tracked_files,
        lines=config.tracked_lines,
        patches=config.tracked_patches,
        seed=request.seed,
    )
    longest = min(spec.max_sequence_tokens, _CONTEXT_TOKENS)
    engine = load_engine(
        Path(request.checkpoint_directory),
        "base_selection",
        request.decoding,
        slots=config.slots,
        max_context_tokens=longest,
    )
    done = itertools.count(1)

    def on_done() -> None:
        workspace.progress.update(next(done), len(functions) + len(files), "completions")

    completer = Completer(engine, renderer, config.slots, longest)
    try:
        await completer.warm_up()
        answers = await completer.complete_all(
            [humaneval.prompt_of(function, config.answer_tokens) for function in functions], on_done
        )
        rate = completer.sampled_tokens / completer.seconds
        rebuilt = await completer.complete_all(
            [_tracking_prompt(file, renderer) for file in files], on_done
        )
    finally:
        engine.close()
    knowledge = CodeKnowledge(
        form="chat" if completer.is_chat else "completion",
        solved=await humaneval.count_solved(functions, answers, request.sandbox),
        problems=len(functions),
        too_long=sum(answer is None for answer in answers),
    )
    return knowledge, state_tracking.score(files, rebuilt), rate


def _tracking_prompt(file: state_tracking.TrackedFile, renderer: Renderer) -> Prompt:
    """The prompt, with a limit of the file's tokens and a quarter more."""
    most_tokens = 5 * len(renderer.encode_content(file.after)) // 4 + 8
    return state_tracking.prompt_of(file, most_tokens)


_BATCH = 4


def rolling_windows(num_tokens: int, window: int) -> Iterator[tuple[int, int, int]]:
    """(first token, first scored token, end) of each window. Every token except the first is scored
    once, with at least half a window of context if so much precedes it.
    """
    stop = 0
    while stop < num_tokens:
        start = max(0, stop - window // 2)
        scored = max(stop, 1)
        stop = min(start + window, num_tokens)
        yield start, scored, stop


@torch.no_grad()
def measure_codebase(
    model: TrainerModel,
    token_ids: Sequence[int],
    source_bytes: int,
    window: int,
    on_window: Callable[[int], None],
) -> CodebaseLoss:
    """Summed loss of all tokens, per byte of source. `on_window` gets the number of tokens done."""
    tokens_N = np.asarray(token_ids, dtype=np.int64)
    windows = list(rolling_windows(len(token_ids), window))
    nats = 0.0
    for first in range(0, len(windows), _BATCH):
        batch = windows[first : first + _BATCH]
        longest = max(stop - start for start, _, stop in batch)
        tokens_BT = np.zeros((len(batch), longest), dtype=np.int64)
        mask_BT = np.zeros((len(batch), longest), dtype=bool)
        for row, (start, scored, stop) in enumerate(batch):
            tokens_BT[row, : stop - start] = tokens_N[start:stop]
            mask_BT[row, scored - start : stop - start] = True
        logprobs_BT = model.token_logprobs(on_device(tokens_BT), mask_BT=on_device(mask_BT))
        nats -= float(logprobs_BT.sum(dtype=torch.float64))
        on_window(batch[-1][2])
    return CodebaseLoss(
        bits_per_byte=nats / math.log(2) / source_bytes,
        source_bytes=source_bytes,
        tokens=len(token_ids),
    )
