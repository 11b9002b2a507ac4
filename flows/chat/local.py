"""A checkpoint that `ostinato chat` loads into its own process."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from ostinato.flows.chat.session import ChatModel
from ostinato.flows.stages import chain, realtime
from ostinato.flows.stages.forms import RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.models.rendering import load_renderer


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
    load_engine = load_entry("ostinato.infra.serving.engine.start:load_engine")
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
