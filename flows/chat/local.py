"""A checkpoint that `ostinato chat`, or a Python program, loads into its own process."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from ostinato.flows.chat.session import ChatModel
from ostinato.flows.stages import chain, realtime
from ostinato.flows.stages.forms import RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.models.decode.config import DecodingConfig
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.rendering import load_renderer

LOAD_ENGINE = "ostinato.infra.serving.engine.start:load_engine"


@contextlib.asynccontextmanager
async def load_local(
    reference: str, recipe: str, overrides: Sequence[str] = ()
) -> AsyncIterator[ChatModel]:
    """The model of a checkpoint served inside this process: a directory, an artifact's name, or "promoted"."""
    context = StageContext.open(recipe, options=RunOptions(overrides=tuple(overrides)))
    directory, name = Path(reference), reference
    if not directory.is_dir():
        promoted = reference == "promoted"
        ref = realtime.champion_ref(context) if promoted else context.artifacts.get(reference)
        directory, name = context.directory_of(ref), str(ref)
    load_engine = load_entry(LOAD_ENGINE)
    harness = chain.harness_for(context.recipe, directory)
    sizes = {"max_context_tokens": harness.context_tokens} if chain.is_imported(directory) else {}
    engine = load_engine(
        directory, name, context.recipe.decoding, slots=4, lookup_entries=0, **sizes
    )
    try:
        limit = min(harness.context_tokens, engine.max_context_tokens)
        harness = harness.model_copy(update={"context_tokens": limit})
        yield ChatModel(
            name,
            harness,
            engine=engine,
            renderer=load_renderer(directory),
            search_directory=chain.search_directory(context),
        )
    finally:
        engine.close()


async def sample_text(
    directory: Path, prompt: str, max_new_tokens: int, temperature: float, seed: int
) -> str:
    """The text that a checkpoint samples after `prompt`, up to a stop token or `max_new_tokens`."""
    renderer = load_renderer(directory)
    token_ids = tuple(renderer.encode_content(prompt))
    limit = len(token_ids) + max_new_tokens
    sizes = {"slots": 1, "lookup_entries": 0, "max_context_tokens": limit}
    engine = load_entry(LOAD_ENGINE)(directory, directory.name, DecodingConfig(), **sizes)
    try:
        request = GenerateRequest(
            request_id="text",
            session_id="text",
            token_ids=token_ids,
            max_new_tokens=max_new_tokens,
            stop_token_ids=renderer.stop_token_ids,
            temperature=temperature,
            seed=seed,
            return_routes=False,
        )
        sampled = list((await engine.generate(request)).token_ids)
    finally:
        engine.close()
    if sampled and sampled[-1] in renderer.stop_token_ids:
        sampled.pop()
    return renderer.decode(sampled)
