"""A home whose heavy stages are finished or stand-ins: problem sets, checkpoints and scorecards as
artifacts, so that what decides about them runs without a model.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ostinato.flows.stages import chain
from ostinato.flows.stages.declared import EVALUATION, PROBLEMS
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.evaluation.statistics import AttemptRow, scorecard_from
from ostinato.tasks.problems.shipped import shipped_checksum
from ostinato.tasks.records import Scorecard, Split

NUM_PROBLEMS = 40


def open_context(directory: Path, name: str, text: str = "") -> StageContext:
    """A recipe of that name over miniature without simulated users, on the home that the
    environment names.
    """
    path = directory / f"{name}.toml"
    path.write_text(f'extends = "miniature"\nname = "{name}"\n{text}')
    context = StageContext.open(str(path))
    cycle = context.recipe.cycle.model_copy(update={"simulated_users": None})
    return replace(context, recipe=context.recipe.model_copy(update={"cycle": cycle}))


def add_problems(context: StageContext, name: str) -> ArtifactRef:
    """A problem set that nobody opens."""
    return _publish(context, "problems", {"set": name}, ())


def add_own_problems(
    context: StageContext, build: Callable[[Path], tuple[Path, dict]]
) -> ArtifactRef:
    """The problem set that the recipe asks for, in place of what its stage would make."""
    request = PROBLEMS.request_of(context.recipe, {"archives_directory": ""})
    shipped = shipped_checksum(context.recipe.problems)
    identity = PROBLEMS.identity_of(request) | ({} if shipped is None else {"shipped": shipped})
    return context.ensure("problems", identity, (), build)


def add_checkpoint(context: StageContext, problems: ArtifactRef, name: str) -> ArtifactRef:
    """A checkpoint that nobody loads."""
    return _publish(context, "reinforcement", {"checkpoint": name}, (problems,))


def add_scorecard(
    context: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef, solve_rate: float
) -> None:
    """The checkpoint's finished evaluation on the held-out problems of a set."""
    fields = chain.evaluation_fields(context, checkpoint, Split.HELD_OUT)
    fields |= {"problems_directory": "", "checkpoint_directory": ""}
    identity = EVALUATION.identity_of(EVALUATION.request_of(context.recipe, fields))
    card = make_scorecard(str(checkpoint), problems.fingerprint, solve_rate)

    def build(directory: Path) -> tuple[Path, dict]:
        return chain.one_file(directory, "scorecard.json", card.model_dump_json()), {}

    context.ensure("evaluation", identity, (problems, checkpoint), build)


def make_scorecard(checkpoint: str, suite_id: str, solve_rate: float) -> Scorecard:
    """One attempt at each problem of a set; the first ones are solved."""
    rows = [
        AttemptRow(
            problem_id=f"{suite_id}-{number}",
            attempt=0,
            solved=number < solve_rate * NUM_PROBLEMS,
            generated_tokens=60,
            turns=3,
            tool_calls=4,
            broken_calls=0,
        )
        for number in range(NUM_PROBLEMS)
    ]
    return scorecard_from(rows, suite="held_out", checkpoint=checkpoint, temperature=1.0)


def _publish(
    context: StageContext, stage: str, identity: dict, parents: tuple[ArtifactRef, ...]
) -> ArtifactRef:
    def build(directory: Path) -> tuple[Path, dict]:
        return chain.one_file(directory, "content.json", str(identity)), {}

    return context.ensure(stage, identity, parents, build)
