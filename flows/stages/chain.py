"""The stages of the chain as functions from a context and parents to artifacts, each built at most once."""

from collections.abc import Set
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from ostinato.flows.recipe import Recipe, base_directory, is_reference
from ostinato.flows.stages.child_task import run_stage
from ostinato.flows.stages.lineage import SOURCES
from ostinato.flows.stages.run_options import STAGES
from ostinato.flows.stages.scorecards import SCORECARD_FILE, keep_scorecard, overlap_of
from ostinato.flows.stages.stage import SUMMARY, StageContext
from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.agent.extensions import COMPACT, FULL
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.objects import checksum_file
from ostinato.models.rendering.chat_template import PUBLISHED as PUBLISHED_FILES
from ostinato.models.training.config import PLACEMENT
from ostinato.tasks.corpus.config import (
    CorpusConfig,
    CorpusRequest,
    CorpusResult,
    DemonstrationConfig,
    FunctionLimits,
    TokenBudgets,
)
from ostinato.tasks.corpus.source_code.sources import pin_sources
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest, EvaluationResult
from ostinato.tasks.pretraining.config import (
    PretrainingConfig,
    PretrainingRequest,
    PretrainingResult,
)
from ostinato.tasks.pretraining.mtp.config import MtpRequest, MtpResult
from ostinato.tasks.pretraining.mtp.speculation_config import SpeculationRequest, SpeculationResult
from ostinato.tasks.problems.config import (
    ProblemsConfig,
    ProblemSelection,
    ProblemsRequest,
    ProblemsResult,
)
from ostinato.tasks.problems.environments.run import EnvironmentsRequest, EnvironmentsResult
from ostinato.tasks.problems.shipped import shipped_checksum
from ostinato.tasks.records import Scorecard, Split
from ostinato.tasks.reinforcement.records import ReinforcementRequest, ReinforcementResult
from ostinato.tasks.retrieval.config import RetrievalRequest, RetrievalResult

ENDPOINT, ENDPOINT_FILE = "endpoint", "endpoint.json"  # kind of artifact, and what it holds
# Models of others know no token of ours: calls are plain text, and texts are longer.
IMPORTED_HARNESS = HarnessConfig(
    dialect=FULL,
    context_tokens=4096,
    max_generated_tokens=1024,
    result_limit_characters=4000,
    read_limit_lines=200,
)
IMPORTED_SLOTS = 8  # requests decoded together; each keeps keys and values of a whole context
Result = TypeVar("Result", bound=BaseModel)


def base_identity(recipe: Recipe) -> str:
    """Checksum of the base checkpoint's weights, wherever it lies. Empty without one."""
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
    """Packages -> proven problems, with those of the recipe's environments beside them."""
    problems = build_proven_problems(context)
    return _add_environments(context, problems) if context.recipe.environments else problems


def _add_environments(context: StageContext, problems: ArtifactRef) -> ArtifactRef:
    """Problems -> the same with those of the recipe's environments."""
    recipe = context.recipe

    def build(directory: Path) -> tuple[Path, dict]:
        request = EnvironmentsRequest(
            problems_directory=str(context.directory_of(problems)),
            environments=recipe.environments,
            seed=recipe.seed,
        )
        result, summary = _run("environments", request, EnvironmentsResult, directory)
        return Path(result.directory), summary

    identity = {"environments": recipe.environments, "seed": recipe.seed}
    return context.ensure("environments", identity, (problems,), build)


def build_proven_problems(context: StageContext) -> ArtifactRef:
    """Packages and git repositories -> proven problems. A set that ships is taken as it is."""
    recipe = context.recipe
    selection = recipe.selection
    request = ProblemsRequest(
        config=recipe.problems,
        selection=selection,
        archives_directory=context.settings.cache_directory / "archives",
    )

    def build(directory: Path) -> tuple[Path, dict]:
        result, summary = _run("problems", request, ProblemsResult, directory)
        return Path(result.directory), {**summary, SOURCES: _sources(recipe.problems)}

    shipped = shipped_checksum(recipe.problems)
    others = {"selection": selection} if selection != ProblemSelection() else {}
    others |= {"shipped": shipped} if shipped is not None else {}
    identity = {"config": recipe.problems, **others} if others else recipe.problems
    return context.ensure("problems", identity, (), build)


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

    def build(directory: Path) -> tuple[Path, dict]:
        request = RetrievalRequest(config=context.recipe.retrieval)
        result, summary = _run("retrieval", request, RetrievalResult, directory)
        return Path(result.directory), summary

    return context.ensure("retrieval", context.recipe.retrieval, (), build)


def encoders_of(context: StageContext) -> tuple[ArtifactRef, ...]:
    """The encoder that answers codebase_search, trained when needed. None where words rank alone."""
    return (train_encoder(context),) if context.recipe.harness.search == "encoder" else ()


def search_directory(context: StageContext) -> str | None:
    """Files of the encoder that answers codebase_search. None where words rank alone."""
    return next((str(context.directory_of(encoder)) for encoder in encoders_of(context)), None)


def build_corpus(context: StageContext, problems: ArtifactRef) -> ArtifactRef:
    """Source code and problems -> token shards and demonstrations."""
    base, sources = base_directory(context.recipe.base_checkpoint), context.recipe.corpus.sources
    pins = pin_sources(sources, context.settings)

    def build(directory: Path) -> tuple[Path, dict]:
        request = CorpusRequest(
            config=context.recipe.corpus,
            pins=pins,
            limits=FunctionLimits(
                max_lines=context.recipe.problems.max_function_lines,
                max_characters=context.recipe.problems.max_function_characters,
            ),
            problems_directory=str(context.directory_of(problems)),
            harness=context.recipe.harness,
            search_directory=search_directory(context),
            tokenizer_path=None if base is None else str(base),
        )
        result, summary = _run("corpus", request, CorpusResult, directory)
        return corpus_files(directory), {**summary, SOURCES: result.sources}

    identity = {
        "config": context.recipe.corpus,
        "harness": context.recipe.harness,
        "base": base_identity(context.recipe),
    } | ({"sources": pins} if any(pins) else {})
    return context.ensure("corpus", identity, (problems, *encoders_of(context)), build)


def build_conversations(context: StageContext, data: Path) -> ArtifactRef:
    """A user's own conversations -> a corpus of nothing else."""
    base = base_directory(context.recipe.base_checkpoint)
    if base is None:
        raise ConfigError(
            f"recipe {context.recipe.name!r} has no base_checkpoint, wanted one to fine-tune"
        )
    config = CorpusConfig(
        sources=(),
        budgets=TokenBudgets(code=0, library=0, repair=0, repair_general=0),
        demonstrations=DemonstrationConfig(count=0),
        conversations=str(data),
        held_out_share=context.recipe.corpus.held_out_share,
        seed=context.recipe.corpus.seed,
    )

    def build(directory: Path) -> tuple[Path, dict]:
        request = CorpusRequest(config=config, problems_directory="", tokenizer_path=str(base))
        _, summary = _run("corpus", request, CorpusResult, directory)
        return corpus_files(directory), summary

    content = config.model_copy(update={"conversations": checksum_file(data)})
    identity = {"config": content, "base": base_identity(context.recipe)}
    return context.ensure("corpus", identity, (), build)


def corpus_files(directory: Path) -> Path:
    """A directory to publish with the corpus that was written beside it."""
    # Not "published": an imported model's template lies in a folder of that name.
    target = directory / "corpus"
    names = ("tokenizer.json", "statistics.json", "demonstrations.safetensors", "shards")
    template = (PUBLISHED_FILES,) if is_imported(directory) else ()
    _link_only(directory, target, (*names, *template))
    return target


def pretrain(
    context: StageContext, corpus: ArtifactRef, start: ArtifactRef | None = None
) -> ArtifactRef:
    """Base checkpoint and corpus -> the fine-tuned checkpoint that RL could start from. `start`:
    trained on in place of the recipe's base. After the phase that `[mtp]` names, draft layers are
    distilled; they learn with the trunk from there.
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
    """Trains through the phases of `config`, draft layers too where `before` is the result of earlier ones."""
    recipe = context.recipe
    base = base_directory(recipe.base_checkpoint) if start is None else context.directory_of(start)
    draft_weight = None if before is None else recipe.mtp.draft_weight

    def build(directory: Path) -> tuple[Path, dict]:
        request = PretrainingRequest(
            config=config,
            corpus_directory=str(context.directory_of(corpus)),
            checkpoint_directory=None if base is None else str(base),
            spec=recipe.model if base is None else None,
            draft_weight=draft_weight,
        )
        result, summary = _run("pretraining", request, PretrainingResult, directory)
        if before is not None:
            summary = {SUMMARY: before.followed_by(result).model_dump(mode="json")}
        return Path(result.checkpoint_directory), summary

    identity = {"config": _without_placement(config), "model": recipe.model}
    identity |= {"base": base_identity(recipe)}
    if draft_weight is not None:
        identity["draft_weight"] = draft_weight
    parents = (corpus,) if start is None else (corpus, start)
    return context.ensure("pretraining", identity, parents, build)


def _without_placement(config: BaseModel, others: Set[str] = frozenset()) -> dict[str, Any]:
    """Settings of a stage that trains, whatever number of ranks and layout computes them."""
    return config.model_dump(mode="json", exclude={*PLACEMENT, *others}, exclude_defaults=True)


def distil_draft_layers(
    context: StageContext, corpus: ArtifactRef, pretrained: ArtifactRef
) -> ArtifactRef:
    """Checkpoint -> the same trunk with draft layers that match its head."""

    def build(directory: Path) -> tuple[Path, dict]:
        request = MtpRequest(
            config=context.recipe.mtp,
            corpus_directory=str(context.directory_of(corpus)),
            checkpoint_directory=str(context.directory_of(pretrained)),
        )
        result, summary = _run("mtp", request, MtpResult, directory)
        return Path(result.checkpoint_directory), summary

    later = {"after_phase", "draft_weight"}  # of what follows
    identity = _without_placement(context.recipe.mtp, later)
    return context.ensure("mtp", identity, (corpus, pretrained), build)


def measure_speculation(
    context: StageContext, corpus: ArtifactRef, checkpoint: ArtifactRef
) -> ArtifactRef:
    """Checkpoint with draft layers -> acceptance and speed-up in the decode engine, plain and drafted in one run."""
    config = context.recipe.speculation

    def build(directory: Path) -> tuple[Path, dict]:
        request = SpeculationRequest(
            config=config,
            decoding=context.recipe.decoding,
            checkpoint_directory=str(context.directory_of(checkpoint)),
            corpus_directory=str(context.directory_of(corpus)),
        )
        result, summary = _run("speculation", request, SpeculationResult, directory)
        return one_file(directory, "speculation.json", result.model_dump_json()), summary

    return context.ensure("speculation", config, (corpus, checkpoint), build)


def reinforce(context: StageContext, problems: ArtifactRef, start: ArtifactRef) -> ArtifactRef:
    """Checkpoint and problems -> the checkpoint after RL."""
    recipe = context.recipe
    identity = {
        "rollout": recipe.rollout,
        "learning": _without_placement(recipe.learning),
        "grading": recipe.grading,
        "harness": recipe.harness,
        "reinforcement": recipe.reinforcement,
        "decoding": recipe.decoding,
    }

    def build(directory: Path) -> tuple[Path, dict]:
        request = ReinforcementRequest(
            run_id=directory.name,
            checkpoint_directory=str(context.directory_of(start)),
            problems_directory=str(context.directory_of(problems)),
            rollout=recipe.rollout,
            learning=recipe.learning,
            harness=recipe.harness,
            grading=recipe.grading,
            decoding=recipe.decoding,
            search_directory=search_directory(context),
            **recipe.reinforcement.model_dump(),
        )
        result, summary = _run("reinforcement", request, ReinforcementResult, directory)
        return Path(result.checkpoint_directory), summary

    parents = (problems, start, *encoders_of(context))
    return context.ensure("reinforcement", identity, parents, build)


def evaluate(
    context: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef, split: Split
) -> Scorecard:
    """Checkpoint and a split of the problems -> a scorecard."""
    ref = evaluation(context, problems, checkpoint, split)
    return Scorecard.model_validate_json((context.directory_of(ref) / SCORECARD_FILE).read_bytes())


def evaluation(
    context: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef, split: Split
) -> ArtifactRef:
    """The artifact of an evaluation: scorecard, a row per attempt, trajectories, overlap with training text."""
    identity = evaluation_identity(context.recipe, split)
    harness = harness_for(context.recipe, context.directory_of(checkpoint))
    identity |= {"harness": harness}

    def build(directory: Path) -> tuple[Path, dict]:
        request = evaluation_request(context, problems, checkpoint, split)
        name = f"evaluation of {checkpoint.kind}, {split.value}"
        result = run_stage(
            name,
            "ostinato.tasks.evaluation.checkpoint.run:main",
            request,
            EvaluationResult,
            directory,
        )
        published = directory / "published"
        overlap = overlap_of(context, checkpoint, problems, split)
        keep_scorecard(context, checkpoint, result, overlap, published)
        return published, {SUMMARY: {"wall_seconds": result.wall_seconds}}

    parents = (problems, checkpoint, *encoders_of(context))
    return context.ensure("evaluation", identity, parents, build)


def imported_base(context: StageContext) -> ArtifactRef | None:
    """The model of others that the recipe begins with. None: it begins with one of our own."""
    name = context.recipe.base_checkpoint
    return context.artifacts.get(name) if is_reference(name) else None


def is_imported(directory: Path) -> bool:
    """Whether a checkpoint, imported or trained from one, talks by a published chat template."""
    return (directory / PUBLISHED_FILES).is_dir()


def endpoint_artifact(context: StageContext, endpoint: Endpoint) -> ArtifactRef:
    """What stands for a model that somebody else serves. It has no weights: nothing promotes it."""

    def build(directory: Path) -> tuple[Path, dict]:
        return one_file(directory, ENDPOINT_FILE, endpoint.model_dump_json()), {}

    return context.ensure(ENDPOINT, {"endpoint": endpoint}, (), build)


def endpoint_of(directory: Path) -> Endpoint | None:
    """The endpoint that an artifact stands for. None: it has weights."""
    path = directory / ENDPOINT_FILE
    return Endpoint.model_validate_json(path.read_bytes()) if path.is_file() else None


def harness_for(recipe: Recipe, directory: Path) -> HarnessConfig:
    """The recipe's harness. For models that other people trained, unless it is of nano's dialect."""
    is_others = is_imported(directory) or endpoint_of(directory) is not None
    is_known = recipe.harness.dialect != COMPACT or not is_others
    return recipe.harness if is_known else IMPORTED_HARNESS


def evaluation_identity(recipe: Recipe, split: Split) -> dict:
    """The part of a recipe that decides how attempts of an evaluation go."""
    return {
        "evaluation": recipe.evaluation,
        "harness": recipe.harness,
        "grading": recipe.grading,
        "decoding": recipe.decoding,
        "sandbox": recipe.rollout.sandbox,
        "split": split.value,
    }


def evaluation_request(
    context: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef, split: Split
) -> EvaluationRequest:
    """An evaluation as the recipe wants it, on this machine's cores."""
    recipe = context.recipe
    directory = context.directory_of(checkpoint)
    endpoint = endpoint_of(directory)
    slots, harness = recipe.reinforcement.engine_slots, harness_for(recipe, directory)
    return EvaluationRequest(
        checkpoint_directory=str(directory),
        endpoint=endpoint,
        checkpoint_name=str(checkpoint) if endpoint is None else endpoint.title,
        problems_directory=str(context.directory_of(problems)),
        split=split,
        config=recipe.evaluation,
        harness=harness,
        sandbox=recipe.rollout.sandbox,
        grading=recipe.grading,
        engine_slots=min(slots, IMPORTED_SLOTS) if harness is IMPORTED_HARNESS else slots,
        context_tokens=harness.context_tokens if is_imported(directory) else 0,
        decoding=recipe.decoding,
        search_directory=search_directory(context),
        processes=context.settings.cpu_limit,
    )


def evaluate_both(
    context: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef
) -> tuple[Scorecard, Scorecard]:
    """Scorecards on held-out mutations and on functions held out whole."""
    first = evaluate(context, problems, checkpoint, Split.HELD_OUT)
    return first, evaluate(context, problems, checkpoint, Split.HELD_OUT_FUNCTION)


def result_of(context: StageContext, ref: ArtifactRef, kind: type[Result]) -> Result:
    """What a stage answered when it made the artifact."""
    return kind.model_validate(context.artifacts.metadata(ref)[SUMMARY])


def _run(
    stage: str, request: BaseModel, kind: type[Result], directory: Path
) -> tuple[Result, dict[str, Any]]:
    """Runs the child of a stage. Returns its result, and the metadata from which `result_of` reads it."""
    result = run_stage(stage, STAGES[stage].entries[0], request, kind, directory)
    return result, {SUMMARY: result.model_dump(mode="json")}


def one_file(directory: Path, name: str, text: str) -> Path:
    """A directory to publish that holds this one file."""
    published = directory / "published"
    published.mkdir(parents=True, exist_ok=True)
    (published / name).write_text(text)
    return published


def _link_only(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """A directory with only these files of another, by hard link."""
    for name in names:
        paths = list((source / name).rglob("*")) if (source / name).is_dir() else [source / name]
        for path in paths:
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file() and not place.exists():
                place.hardlink_to(path)
