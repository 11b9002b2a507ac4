"""Flow: a user's own conversations in, the recipe's base checkpoint fine-tuned on them out."""

from dataclasses import replace
from pathlib import Path

from prefect import flow

from ostinato.flows.reporting import showing
from ostinato.flows.stages import chain
from ostinato.flows.stages.console import say
from ostinato.flows.stages.forms import RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.run_options import Options
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.models.training.config import DEMONSTRATIONS
from ostinato.tasks.corpus.chat_rows import read_conversations
from ostinato.tasks.corpus.config import CONVERSATIONS, CorpusResult
from ostinato.tasks.pretraining.config import PretrainingResult


@flow(name="sft", flow_run_name=run_name)
def sft(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    data: str = "",
    options: Options = None,
) -> ArtifactRef:
    """Fine-tunes the recipe's base checkpoint on conversations, with its phases of pretraining that
    read nothing but demonstrations. Returns the checkpoint.

    Args:
        data: .jsonl or .parquet file of OpenAI's chats; a row has messages, and tools if any.
    """
    context = _fine_tuning(StageContext.open(recipe, seed, options))
    path = Path(data)
    if not path.is_file():
        raise ConfigError(f"--data {data!r} is no file, wanted a .jsonl or .parquet file")
    read_conversations(path)  # before anything starts
    corpus = chain.build_conversations(context, path.resolve())
    tuned = chain.pretrain(_measured(context, corpus), corpus)
    showing.show_pretraining(context, corpus, tuned)
    result = chain.result_of(context, tuned, PretrainingResult)
    left_out = result.transcripts_too_long
    say(
        f"{tuned}: held-out conversations, perplexity {result.before.perplexity:.2f} -> "
        f"{result.after.perplexity:.2f}; {left_out} too long for a microbatch and left out"
    )
    return tuned


def _measured(context: StageContext, corpus: ArtifactRef) -> StageContext:
    """The recipe with rows that the held-out conversations fill, however few they are."""
    shards = chain.result_of(context, corpus, CorpusResult).shards
    held_out = sum(shard.tokens for shard in shards)
    config = context.recipe.pretraining
    rows = min(config.evaluation_row_tokens, held_out)
    config = config.model_copy(update={"evaluation_row_tokens": rows})
    return replace(context, recipe=context.recipe.model_copy(update={"pretraining": config}))


def _fine_tuning(context: StageContext) -> StageContext:
    """The recipe with its phases for transcripts alone, under a name of its own."""
    recipe = context.recipe
    phases = tuple(
        phase for phase in recipe.pretraining.phases if phase.blend.keys() == {DEMONSTRATIONS}
    )
    if not phases:
        raise ConfigError(
            f"recipe {recipe.name!r} has no phase of pretraining that reads {DEMONSTRATIONS!r} alone, wanted "
            "one: its rates and lengths are those of fine-tuning"
        )
    config = recipe.pretraining.model_copy(
        update={"phases": phases, "codebase_sources": (CONVERSATIONS,)}
    )
    alone = recipe.mtp.model_copy(update={"after_phase": None})
    tuning = recipe.model_copy(
        update={"name": f"{recipe.name}-sft", "pretraining": config, "mtp": alone}
    )
    return replace(context, recipe=tuning)
