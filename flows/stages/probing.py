"""Probes: attempts of a checkpoint at each training problem. Their solve rates decide which problems RL begins with."""

from collections import Counter
from pathlib import Path

from ostinato.flows.stages import chain, declared
from ostinato.flows.stages.lineage import SOLVED
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.evaluation.checkpoint.records import EvaluationResult
from ostinato.tasks.evaluation.config import EvaluationConfig
from ostinato.tasks.problems.config import PROBLEMS_FILE
from ostinato.tasks.records import Scorecard, Split
from ostinato.tasks.rollout.config import PROBE_ATTEMPTS, PROBES_FILE, START_PROBES

_ALL_PROBLEMS = 1_000_000  # more than any set holds


def probe(
    context: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef, attempts: int
) -> ArtifactRef:
    """Checkpoint and training problems -> a scorecard of attempts with the temperature and turns of rollouts."""
    rollout = context.recipe.rollout
    fields = chain.evaluation_fields(context, checkpoint, Split.TRAIN)
    harness = fields.pop("harness")
    turns = rollout.max_turns or harness.max_turns

    def publish(directory: Path, result: EvaluationResult) -> tuple[Path, dict]:
        text = result.scorecard.model_dump_json(indent=1)
        return declared.one_file(directory, PROBES_FILE, text), {
            declared.SUMMARY: {"wall_seconds": result.wall_seconds},
            SOLVED: _count_solved(result.scorecard),
        }

    return context.make(
        declared.PROBING,
        {"problems": problems, "checkpoint": checkpoint, "search": chain.encoder_of(context)},
        title=f"probes of {checkpoint}",
        publish=publish,
        config=EvaluationConfig(
            problems=_ALL_PROBLEMS,
            attempts_per_problem=attempts,
            temperature=rollout.temperature,
            seed=rollout.seed,
        ),
        harness=harness.model_copy(update={"max_turns": turns}),
        **fields,
    )


def _count_solved(card: Scorecard) -> dict[str, int]:
    """Number of problems by solved attempts, such as "1 of 4"."""
    attempts = card.attempts_per_problem
    counts = Counter(score.solved for score in card.problems)
    return {f"{solved} of {attempts}": counts[solved] for solved in range(attempts + 1)}


def named_probes(context: StageContext) -> ArtifactRef | None:
    """The probes that the recipe names. None when it names none, or those of RL's start. ConfigError when they are
    missing.
    """
    name = context.recipe.rollout.curriculum.probes
    if name is None or name == START_PROBES:
        return None
    try:
        return context.artifacts.get(name)
    except ConfigError as error:
        raise ConfigError(
            f"rollout.curriculum.probes: {error}; `ostinato problems probe` makes some"
        ) from None


def refuse_other_set(context: StageContext, probes: ArtifactRef, problems: ArtifactRef) -> None:
    """Raises ConfigError for probes of another problem set. A set that was built again with the same content is
    the same.
    """
    measured, *_ = context.artifacts.manifest(probes).parents
    if _content(context, measured) != _content(context, problems):
        raise ConfigError(
            f"rollout.curriculum.probes is {probes}, measured on {measured}, wanted probes of {problems}: "
            f"`ostinato problems probe --recipe {context.recipe.name} --checkpoint CHECKPOINT` makes them"
        )


def probes_for(
    context: StageContext, problems: ArtifactRef, start: ArtifactRef
) -> ArtifactRef | None:
    """The probes that RL from `start` begins with, made when the recipe asks for those of the start. None: without."""
    if context.recipe.rollout.curriculum.probes == START_PROBES:
        return probe(context, problems, start, PROBE_ATTEMPTS)
    return named_probes(context)


def _content(context: StageContext, problems: ArtifactRef) -> list[str]:
    """Checksum of the problems, which hold the fingerprints of their repositories."""
    files = context.artifacts.manifest(problems).files
    return [file.checksum for file in files if file.path == PROBLEMS_FILE]
