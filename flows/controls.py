"""Flow: compares the checkpoint after RL with its start at equal tokens, and with its start fine-tuned further."""

import json
import math
from dataclasses import replace
from pathlib import Path

from prefect import flow

from ostinato.flows.mtp_distillation import mtp_distillation
from ostinato.flows.problem_building import problem_building
from ostinato.flows.reinforcement import reinforcement
from ostinato.flows.reporting.evaluations import read_rows, show_controls
from ostinato.flows.stages import chain
from ostinato.flows.stages.console import say
from ostinato.flows.stages.forms import Options, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.evaluation.controls import ControlReport, compare_with_controls
from ostinato.tasks.pretraining.config import PretrainingResult
from ostinato.tasks.records import Split
from ostinato.tasks.reinforcement.records import ReinforcementResult

FINE_TUNING = "further fine-tuning"  # name of the control


@flow(name="controls", flow_run_name=run_name)
def controls(
    recipe: RecipeName = "nano", seed: Seed = None, options: Options = None
) -> ArtifactRef:
    """Evaluates a checkpoint before and after RL and compares both at equal tokens. Also compares with the start
    fine-tuned further when the recipe's `[controls]` ask for it. Returns the table.
    """
    context = StageContext.open(recipe, seed, options)
    problems = problem_building(recipe, seed, options=context.options)
    start = mtp_distillation(recipe, seed, problems, options=context.options)
    trained = reinforcement(recipe, seed, problems, start, options=context.options)
    others = {}
    if context.recipe.controls.fine_tuning_tokens:
        others[FINE_TUNING] = fine_tune_further(context, problems, start)
    report = compare(context, problems, start, trained, others)
    show_controls(chain.result_of(context, report, ControlReport))
    for other in others.values():
        _say_times(context, trained, other)
    return report


def fine_tune_further(
    context: StageContext, problems: ArtifactRef, start: ArtifactRef
) -> ArtifactRef:
    """Trains RL's start with the recipe's last phase on newly drawn demonstrations of the same problems, as
    many as `[controls] fine_tuning_tokens` need. Returns the checkpoint, under a separate name.
    """
    recipe, tokens = context.recipe, context.recipe.controls.fine_tuning_tokens
    if not recipe.pretraining.phases:
        raise ConfigError(
            f"controls.fine_tuning_tokens={tokens} in recipe {recipe.name!r} without a pretraining phase, wanted 0: "
            "the last phase is what is trained further"
        )
    last = recipe.pretraining.phases[-1]
    shown = recipe.corpus.demonstrations
    count = math.ceil(shown.count * tokens / last.tokens)
    further = recipe.model_copy(
        update={
            "name": f"{recipe.name}-further",
            "base_checkpoint": str(start),  # the corpus uses its tokenizer
            "corpus": recipe.corpus.model_copy(
                update={
                    "seed": recipe.corpus.seed + 1,
                    "demonstrations": shown.model_copy(update={"count": count}),
                }
            ),
            "pretraining": recipe.pretraining.model_copy(
                update={"phases": (last.model_copy(update={"tokens": tokens}),)}
            ),
            "mtp": recipe.mtp.model_copy(update={"after_phase": None}),
        }
    )
    renamed = replace(context, recipe=further)
    return chain.pretrain(renamed, chain.build_corpus(renamed, problems), start)


def compare(
    context: StageContext,
    problems: ArtifactRef,
    start: ArtifactRef,
    trained: ArtifactRef,
    others: dict[str, ArtifactRef],
) -> ArtifactRef:
    """Evaluates the checkpoints. Returns the published report."""
    names, checkpoints = list(others), (start, trained, *others.values())
    rows = [
        chain.evaluation(context, problems, checkpoint, Split.HELD_OUT)
        for checkpoint in checkpoints
    ]

    def build(directory: Path) -> tuple[Path, dict]:
        before, after, *more = [read_rows(context, row) for row in rows]
        report = compare_with_controls(before, after, dict(zip(names, more, strict=True)))
        found = report.model_dump(mode="json")
        text = json.dumps(found, indent=1)
        return chain.one_file(directory, "controls.json", text), {chain.SUMMARY: found}

    return context.ensure("controls", {}, rows, build)


def _say_times(context: StageContext, trained: ArtifactRef, other: ArtifactRef) -> None:
    """Prints the time of RL and of the fine-tuning it is compared with."""
    rl_seconds = chain.result_of(context, trained, ReinforcementResult).used_seconds
    phases = chain.result_of(context, other, PretrainingResult).phases
    seconds = sum(phase.seconds for phase in phases)
    say(f"wall time: RL {rl_seconds:.0f} s, {FINE_TUNING} {seconds:.0f} s")
