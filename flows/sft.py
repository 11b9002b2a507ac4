"""Flow: fine-tunes the recipe's base checkpoint on a user's own conversations."""

from dataclasses import replace
from pathlib import Path

from prefect import flow

from ostinato.flows.reporting import showing
from ostinato.flows.stages import chain
from ostinato.flows.stages.console import say
from ostinato.flows.stages.forms import Options, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.row_files import find_conversations
from ostinato.infra.platform.settings import Settings
from ostinato.models.training.config import DEMONSTRATIONS
from ostinato.tasks.corpus.chat_rows import check_conversations
from ostinato.tasks.corpus.config import CONVERSATIONS, CorpusResult
from ostinato.tasks.corpus.hub_rows import fetch_rows
from ostinato.tasks.pretraining.config import PretrainingResult


@flow(name="sft", flow_run_name=run_name)
def sft(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    data: str = "",
    options: Options = None,
) -> ArtifactRef:
    """Fine-tunes the recipe's base checkpoint on conversations, using those of its pretraining phases that
    read only demonstrations. Returns the checkpoint.

    Args:
        data: .jsonl or .parquet file of chats in OpenAI's format (a row has messages, and tools if any) or in
            ShareGPT's, or a data set of the hub as ORG/NAME[@REVISION].
    """
    context = _with_transcript_phases(StageContext.open(recipe, seed, options))
    path = data_file(context.settings, data)
    check_conversations(path)  # so that a bad file fails before anything starts
    corpus = chain.build_conversations(context, path.resolve())
    tuned = chain.pretrain(_with_fitting_rows(context, corpus), corpus)
    showing.show_pretraining(context, corpus, tuned)
    result = chain.result_of(context, tuned, PretrainingResult)
    left_out = result.transcripts_too_long
    say(
        f"{tuned}: held-out conversations, perplexity {result.before.perplexity:.2f} -> "
        f"{result.after.perplexity:.2f}; {left_out} too long for a microbatch and left out"
    )
    return tuned


def data_file(settings: Settings, data: str) -> Path:
    """The file of this name, or the rows of the hub's data set, which are fetched."""
    found = find_conversations(data)
    return found if isinstance(found, Path) else fetch_rows(found, settings.cache_directory)


def _with_fitting_rows(context: StageContext, corpus: ArtifactRef) -> StageContext:
    """The context with evaluation rows short enough for the held-out conversations to fill one."""
    shards = chain.result_of(context, corpus, CorpusResult).shards
    held_out = sum(shard.tokens for shard in shards)
    config = context.recipe.pretraining
    rows = min(config.evaluation_row_tokens, held_out)
    config = config.model_copy(update={"evaluation_row_tokens": rows})
    return replace(context, recipe=context.recipe.model_copy(update={"pretraining": config}))


def _with_transcript_phases(context: StageContext) -> StageContext:
    """The context with only the recipe's phases for transcripts, under a separate recipe name."""
    recipe = context.recipe
    phases = tuple(
        phase for phase in recipe.pretraining.phases if phase.blend.keys() == {DEMONSTRATIONS}
    )
    if not phases:
        raise ConfigError(
            f"recipe {recipe.name!r} has no pretraining phase that reads only {DEMONSTRATIONS!r}, wanted "
            "one: fine-tuning uses its learning rates and lengths"
        )
    config = recipe.pretraining.model_copy(
        update={"phases": phases, "codebase_sources": (CONVERSATIONS,)}
    )
    alone = recipe.mtp.model_copy(update={"after_phase": None})
    tuning = recipe.model_copy(
        update={"name": f"{recipe.name}-sft", "pretraining": config, "mtp": alone}
    )
    return replace(context, recipe=tuning)
