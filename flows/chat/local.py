"""A checkpoint that `ostinato chat` loads into its own process."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from ostinato.flows import chain, realtime
from ostinato.flows.chat.session import ServedModel
from ostinato.flows.stage import StageContext
from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.extensions import FULL
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.models.rendering import load_renderer
from ostinato.models.rendering.chat_template import PUBLISHED

# Models of others know no token of ours: calls are plain text, and texts are longer.
IMPORTED_HARNESS = HarnessConfig(
    dialect=FULL,
    context_tokens=4096,
    max_generated_tokens=1024,
    result_limit_characters=4000,
    read_limit_lines=200,
)


@contextlib.asynccontextmanager
async def load_local(reference: str, recipe: str) -> AsyncIterator[ServedModel]:
    """A checkpoint served inside this process: a directory, an artifact's name, or "promoted"."""
    context = StageContext.open(recipe)
    directory, name = Path(reference), reference
    if not directory.is_dir():
        promoted = reference == "promoted"
        ref = realtime.champion_ref(context) if promoted else context.artifacts.get(reference)
        directory, name = context.directory_of(ref), str(ref)
    load_engine = load_entry("ostinato.infra.serving.engine.local:load_local_engine")
    is_imported = (directory / PUBLISHED).is_dir()
    harness = IMPORTED_HARNESS if is_imported else context.recipe.harness
    sizes = {"max_context_tokens": harness.context_tokens} if is_imported else {}
    engine = load_engine(
        directory, name, context.recipe.decoding, slots=4, lookup_entries=0, **sizes
    )
    try:
        limit = min(harness.context_tokens, engine.max_context_tokens)
        harness = harness.model_copy(update={"context_tokens": limit})
        yield ServedModel(
            name,
            harness,
            engine=engine,
            renderer=load_renderer(directory),
            search_directory=chain.search_directory(context),
        )
    finally:
        engine.close()
