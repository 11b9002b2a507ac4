"""The stages of the chain as functions from a context and parent artifacts to artifacts, each built at most once."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ostinato.flows.recipe import Recipe, base_directory, is_reference
from ostinato.flows.stages import declared
from ostinato.flows.stages.console import say
from ostinato.flows.stages.declared import SUMMARY, Result, one_file
from ostinato.flows.stages.lineage import SOURCES
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.published.choice import read_choice
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.agent.extensions import COMPACT, FULL
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger.rows import ScorecardRow
from ostinato.infra.platform.objects import checksum_file
from ostinato.infra.platform.record import Record
from ostinato.models.rendering.chat_template import PUBLISHED as PUBLISHED_FILES
from ostinato.tasks.corpus.config import (
    AnswerOverlap,
    CorpusConfig,
    CorpusResult,
    DemonstrationConfig,
    FunctionLimits,
    TokenBudgets,
)
from ostinato.tasks.corpus.source_code.sources import pin_sources
from ostinato.tasks.evaluation.checkpoint.records import EvaluationResult
from ostinato.tasks.pretraining.config import PretrainingConfig, PretrainingResult
from ostinato.tasks.pretraining.mtp.config import MtpConfig
from ostinato.tasks.problems.config import ProblemsConfig, ProblemsResult, pin_commits
from ostinato.tasks.problems.shipped import shipped_checksum
from ostinato.tasks.records import Scorecard, Split

if TYPE_CHECKING:  # only the flow that opens suites loads what reads them
    from ostinato.tasks.problems.suites import SuiteCard

ENDPOINT_FILE = "endpoint.json"
SCORECARD_FILE = "scorecard.json"
ROWS_FILE = "rows.jsonl"  # one line per attempt
OVERLAP_FILE = "overlap.json"
# Other people's models have none of our special tokens: calls are plain text, and texts are longer.
IMPORTED_HARNESS = HarnessConfig(
    dialect=FULL,
    context_tokens=4096,
    max_generated_tokens=1024,
    result_limit_characters=4000,
    read_limit_lines=200,
)
IMPORTED_SLOTS = 8  # requests decoded together; each holds the KV cache of a whole context


class TrainingOverlap(Record):
    """Overlap of evaluated problems with text that the checkpoint's stages train on."""

    checkpoint: str
    problems: str
    split: Split | None = Field(description="None: the problems of a suite")
    corpora: dict[str, AnswerOverlap] = Field(
        description="overlaps by corpus, for corpora of these problems that the checkpoint descends from; empty: "
        "unknown, as for other people's models"
    )


def base_identity(recipe: Recipe) -> str:
    """Checksum of the base checkpoint's weights, independent of its location. Empty without one."""
    base = base_directory(recipe.base_checkpoint)
    if base is None:
        return ""
    weights = base / "model.safetensors"
    if not weights.is_file():
        raise ConfigError(
            f"base_checkpoint {recipe.base_checkpoint!r}: no file {weights}, wanted a checkpoint directory"
        )
    return checksum_file(weights)


def build_problems(context: StageContext) -> ArtifactRef:
    """Packages -> proven problems, together with the problems of the recipe's environments."""
    problems = build_proven_problems(context)
    if not context.recipe.environments:
        return problems
    return context.make(declared.ENVIRONMENTS, {"problems": problems})


def build_proven_problems(context: StageContext) -> ArtifactRef:
    """Packages and git repositories -> proven problems. A set that ships with the project is used as it is."""
    config = pin_commits(context.recipe.problems)
    pinned = context.recipe.model_copy(update={"problems": config})
    context = replace(context, recipe=pinned)

    def publish(directory: Path, result: ProblemsResult) -> tuple[Path, dict]:
        made, notes = declared.PROBLEMS.output_of(directory, result)
        return made, notes | {SOURCES: _sources(config)}

    shipped = shipped_checksum(config)
    return context.make(
        declared.PROBLEMS,
        {},
        archives_directory=context.settings.cache_directory / "archives",
        identity={} if shipped is None else {"shipped": shipped},
        publish=publish,
    )


def _sources(config: ProblemsConfig) -> list[str]:
    """Source archives and git repositories of a problem set, as its lineage names them."""
    archives = [
        f"{source.name}=={source.version}" + (f" sha256:{source.sha256}" if source.sha256 else "")
        for source in config.repositories
    ]
    archives += [f"{item.name}=={item.version} sha256:{item.sha256}" for item in config.given]
    return archives + [f"{source.path} at {source.revision}" for source in config.git]


def train_encoder(context: StageContext) -> ArtifactRef:
    """The code of the recipe's packages -> the encoder of code search."""
    return context.make(declared.RETRIEVAL, {})


def encoder_of(context: StageContext) -> ArtifactRef | None:
    """The encoder that answers codebase_search, trained when needed. None when search ranks by words alone."""
    return train_encoder(context) if context.recipe.harness.search == "encoder" else None


def search_directory(context: StageContext) -> str | None:
    """Files of the encoder that answers codebase_search. None when search ranks by words alone."""
    encoder = encoder_of(context)
    return None if encoder is None else str(context.directory_of(encoder))


def build_corpus(context: StageContext, problems: ArtifactRef) -> ArtifactRef:
    """Source code and problems -> token shards and demonstrations, which are left out if no phase trains."""
    recipe = context.recipe
    base, limits = base_directory(recipe.base_checkpoint), recipe.problems
    config, is_trained = recipe.corpus, recipe.pretraining.phases or recipe.mtp.depth
    if not is_trained:
        shown = config.demonstrations.model_copy(update={"count": 0})
        config = config.model_copy(update={"demonstrations": shown})
    return context.make(
        declared.CORPUS,
        {"problems": problems, "search": encoder_of(context)},
        config=config,
        pins=pin_sources(recipe.corpus.sources, context.settings),
        limits=FunctionLimits(
            max_lines=limits.max_function_lines, max_characters=limits.max_function_characters
        ),
        tokenizer_path=None if base is None else str(base),
        identity={"base": base_identity(recipe)},
        publish=_publish_corpus,
    )


def build_conversations(context: StageContext, data: Path) -> ArtifactRef:
    """A user's own conversations -> a corpus that holds only them."""
    recipe = context.recipe
    base = base_directory(recipe.base_checkpoint)
    if base is None:
        raise ConfigError(f"recipe {recipe.name!r} has no base_checkpoint, wanted one to fine-tune")
    config = CorpusConfig(
        sources=(),
        budgets=TokenBudgets(code=0, library=0, repair=0, repair_general=0),
        demonstrations=DemonstrationConfig(count=0),
        conversations=str(data),
        held_out_share=recipe.corpus.held_out_share,
        seed=recipe.corpus.seed,
    )
    return context.make(
        declared.CORPUS,
        {},
        config=config,
        harness=HarnessConfig(),
        problems_directory="",
        tokenizer_path=str(base),
        identity={
            "base": base_identity(recipe),
            "config": config.model_copy(update={"conversations": checksum_file(data)}),
        },
        publish=_publish_corpus,
    )


def _publish_corpus(directory: Path, result: CorpusResult) -> tuple[Path, dict]:
    _, notes = declared.CORPUS.output_of(directory, result)
    return corpus_files(directory), notes | {SOURCES: result.sources}


def corpus_files(directory: Path) -> Path:
    """A directory to publish, with links to the corpus files of `directory`."""
    # Not named "published": an imported model's template is in a folder of that name.
    target = directory / "corpus"
    names = ("tokenizer.json", "statistics.json", "demonstrations.safetensors", "shards")
    template = (PUBLISHED_FILES,) if is_imported(directory) else ()
    _link_only(directory, target, (*names, *template))
    return target


def pretrain(
    context: StageContext, corpus: ArtifactRef, start: ArtifactRef | None = None
) -> ArtifactRef:
    """Base checkpoint and corpus -> the fine-tuned checkpoint that RL can start from. `start` replaces
    the recipe's base. After the phase that `[mtp]` names, draft layers are distilled, and later phases
    train them with the trunk.
    """
    config, cut = context.recipe.pretraining, context.recipe.mtp.after_phase
    if cut is None:
        return _pretrain(context, corpus, start, config)
    earlier, later = config.cut_after(cut)
    trunk = _pretrain(context, corpus, start, earlier)
    drafted = distil_draft_layers(context, corpus, trunk)
    before = result_of(context, trunk, PretrainingResult)
    return _pretrain(context, corpus, drafted, later, before)


def _pretrain(
    context: StageContext,
    corpus: ArtifactRef,
    start: ArtifactRef | None,
    config: PretrainingConfig,
    before: PretrainingResult | None = None,
) -> ArtifactRef:
    """Trains the phases of `config`. When `before` is the result of earlier phases, draft layers are trained too."""
    recipe = context.recipe
    fields: dict[str, Any] = {"config": config}
    if start is None:
        base = base_directory(recipe.base_checkpoint)
        fields |= {"spec": recipe.model} if base is None else {"checkpoint_directory": str(base)}
    if before is not None:
        fields["draft_weight"] = recipe.mtp.draft_weight

    def publish(directory: Path, result: PretrainingResult) -> tuple[Path, dict]:
        made, notes = declared.PRETRAINING.output_of(directory, result)
        if before is not None:
            notes = {SUMMARY: before.followed_by(result).model_dump(mode="json")}
        return made, notes

    return context.make(
        declared.PRETRAINING,
        {"corpus": corpus, "checkpoint": start},
        identity={"base": base_identity(recipe), "model": recipe.model},
        publish=publish,
        **fields,
    )


def distil_draft_layers(
    context: StageContext, corpus: ArtifactRef, pretrained: ArtifactRef
) -> ArtifactRef:
    """Checkpoint -> the same trunk with draft layers distilled to match its head."""
    config = context.recipe.mtp
    later = {name: MtpConfig.model_fields[name].default for name in ("after_phase", "draft_weight")}
    return context.make(
        declared.MTP,
        {"corpus": corpus, "checkpoint": pretrained},
        config=config.model_copy(update=later),  # fields that only later phases read are reset
    )


def measure_speculation(
    context: StageContext, corpus: ArtifactRef, checkpoint: ArtifactRef
) -> ArtifactRef:
    """Checkpoint with draft layers -> acceptance and speed-up, from plain and drafted decoding in one run."""
    return context.make(declared.SPECULATION, {"corpus": corpus, "checkpoint": checkpoint})


def reinforce(
    context: StageContext,
    problems: ArtifactRef,
    start: ArtifactRef,
    probes: ArtifactRef | None = None,
) -> ArtifactRef:
    """Checkpoint and problems -> the checkpoint after RL. `probes`: solve rates that it begins with."""
    parents = {"problems": problems, "checkpoint": start}
    parents |= {"search": encoder_of(context), "probes": probes}
    options = dict(context.recipe.reinforcement)
    return context.make(declared.REINFORCEMENT, parents, run_id="", **options)


def run_added_stages(
    context: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef, after: str
) -> ArtifactRef:
    """Checkpoint of a shipped stage -> the checkpoint after the stages that the recipe adds behind it."""
    pipeline = context.recipe.pipeline
    for name in pipeline.added_after(after):
        checkpoint = context.make(
            declared.OWN_STAGE,
            {"problems": problems, "checkpoint": checkpoint},
            title=f"stage {name}",
            stage_name=name,
            settings=pipeline.settings.get(name, {}),
        )
        summary = context.artifacts.metadata(checkpoint)[SUMMARY]
        say(f"stage {name}: {checkpoint}, {summary['changed_ratio']:.1%} of the values changed")
    return checkpoint


def evaluate(
    context: StageContext,
    problems: ArtifactRef,
    checkpoint: ArtifactRef,
    split: Split | None,
    suite: "SuiteCard | None" = None,
) -> Scorecard:
    """Checkpoint and a split of the problems, or all those of a suite (no split) -> a scorecard."""
    ref = evaluation(context, problems, checkpoint, split, suite)
    return Scorecard.model_validate_json((context.directory_of(ref) / SCORECARD_FILE).read_bytes())


def evaluation(
    context: StageContext,
    problems: ArtifactRef,
    checkpoint: ArtifactRef,
    split: Split | None,
    suite: "SuiteCard | None" = None,
) -> ArtifactRef:
    """The artifact of an evaluation: scorecard, a row per attempt, trajectories, overlap with training text."""
    fields = evaluation_fields(context, checkpoint, split)
    if suite is not None:
        config = context.recipe.evaluation.model_copy(update={"problems": suite.problems})
        fields |= {"suite": suite.title, "config": config}

    def publish(directory: Path, result: EvaluationResult) -> tuple[Path, dict]:
        published = directory / "published"
        overlap = overlap_of(context, checkpoint, problems, split)
        keep_scorecard(context, checkpoint, result, overlap, published)
        return published, {SUMMARY: {"wall_seconds": result.wall_seconds}}

    return context.make(
        declared.EVALUATION,
        {"problems": problems, "checkpoint": checkpoint, "search": encoder_of(context)},
        title=f"evaluation of {checkpoint.kind}, {fields.get('suite', split)}",
        publish=publish,
        **fields,
    )


def overlap_of(
    context: StageContext, checkpoint: ArtifactRef, problems: ArtifactRef, split: Split | None
) -> TrainingOverlap:
    """Overlap of a split's problems with training text, as measured when the checkpoint's corpora were built."""
    corpora = {
        str(corpus): found
        for corpus in context.artifacts.lineage(checkpoint)
        if corpus.kind == declared.CORPUS.kind
        and problems in context.artifacts.manifest(corpus).parents
        for found in result_of(context, corpus, CorpusResult).overlap
        if found.split is split
    }
    return TrainingOverlap(
        checkpoint=str(checkpoint), problems=str(problems), split=split, corpora=corpora
    )


def keep_scorecard(
    context: StageContext,
    checkpoint: ArtifactRef,
    result: EvaluationResult,
    overlap: TrainingOverlap,
    place: Path,
) -> None:
    """Adds the scorecard to the ledger and writes the files to publish: the scorecard, a row and a trajectory
    per attempt, and the problems' overlap with training text.
    """
    card = result.scorecard
    row = ScorecardRow(
        scorecard_id=card.scorecard_id,
        checkpoint_id=str(checkpoint),
        suite=card.suite,
        payload=card.model_dump(mode="json"),
        created_at=time.time(),
    )
    context.ledger.scorecards.add(row)
    place.mkdir(parents=True, exist_ok=True)
    (place / SCORECARD_FILE).write_text(card.model_dump_json())
    (place / ROWS_FILE).write_text("\n".join(row.model_dump_json() for row in result.rows))
    (place / OVERLAP_FILE).write_text(overlap.model_dump_json(indent=1))
    shutil.copy(result.trajectories_path, place)


def evaluation_fields(
    context: StageContext, checkpoint: ArtifactRef, split: Split | None
) -> dict[str, Any]:
    """Fields of an evaluation's request that follow from the checkpoint and this machine's cores."""
    recipe = context.recipe
    directory = context.directory_of(checkpoint)
    endpoint, harness = endpoint_of(directory), harness_for(recipe, directory)
    slots = recipe.reinforcement.engine_slots
    return {
        "endpoint": endpoint,
        "checkpoint_name": str(checkpoint) if endpoint is None else endpoint.title,
        "split": split,
        "harness": harness,
        "sandbox": recipe.rollout.sandbox,
        "engine_slots": slots if _fits_harness(recipe, directory) else min(slots, IMPORTED_SLOTS),
        "context_tokens": harness.context_tokens if is_imported(directory) else 0,
        "processes": context.settings.cpu_limit,
    }


def imported_base(context: StageContext) -> ArtifactRef | None:
    """The artifact that the recipe starts from. None: it starts from a directory or random weights."""
    name = context.recipe.base_checkpoint
    return context.artifacts.get(name) if is_reference(name) else None


def is_imported(directory: Path) -> bool:
    """Whether a checkpoint uses a published chat template: it was imported, or trained from an imported one."""
    return (directory / PUBLISHED_FILES).is_dir()


def endpoint_artifact(context: StageContext, endpoint: Endpoint) -> ArtifactRef:
    """The artifact that represents a model served by somebody else. It has no weights, so it is never promoted."""
    if not context.recipe.harness.is_builtin:
        raise ConfigError(
            f"endpoint is given with harness.program {context.recipe.harness.program!r}, wanted 'builtin': "
            "a program talks only to the session of its own attempt"
        )

    def build(directory: Path) -> tuple[Path, dict]:
        return one_file(directory, ENDPOINT_FILE, endpoint.model_dump_json()), {}

    return context.ensure(declared.ENDPOINT.name, {"endpoint": endpoint}, (), build)


def endpoint_of(directory: Path) -> Endpoint | None:
    """The endpoint that an artifact represents. None: the artifact has weights."""
    path = directory / ENDPOINT_FILE
    return Endpoint.model_validate_json(path.read_bytes()) if path.is_file() else None


def harness_for(recipe: Recipe, directory: Path) -> HarnessConfig:
    """The recipe's harness. When that uses nano's dialect and the model is not ours, a harness in the dialect
    that `ostinato import` chose.
    """
    if _fits_harness(recipe, directory):
        return recipe.harness
    return IMPORTED_HARNESS.model_copy(update={"dialect": read_choice(directory)})


def _fits_harness(recipe: Recipe, directory: Path) -> bool:
    """Whether this model can use the recipe's harness."""
    is_foreign = is_imported(directory) or endpoint_of(directory) is not None
    return recipe.harness.dialect != COMPACT or not is_foreign


def evaluate_both(
    context: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef
) -> tuple[Scorecard, Scorecard]:
    """Scorecards on held-out mutations and on wholly held-out functions."""
    first = evaluate(context, problems, checkpoint, Split.HELD_OUT)
    return first, evaluate(context, problems, checkpoint, Split.HELD_OUT_FUNCTION)


def result_of(context: StageContext, ref: ArtifactRef, kind: type[Result]) -> Result:
    """The result of the shipped stage that made an artifact, or from whose checkpoint added stages derived it."""
    return kind.model_validate(context.artifacts.metadata(context.shipped_origin(ref))[SUMMARY])


def _link_only(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Fills `target` with hard links to these files and folders of `source`."""
    for name in names:
        paths = list((source / name).rglob("*")) if (source / name).is_dir() else [source / name]
        for path in paths:
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file() and not place.exists():
                place.hardlink_to(path)
