"""Flow: evaluates a checkpoint on held-out problems and applies the gate. Ends Failed when the gate fails."""

import logging
from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from ostinato.flows.commands.run_flow import GATE_FAILED
from ostinato.flows.problem_building import problems_for
from ostinato.flows.reporting.evaluations import EvaluationReport, note_overlap, show_evaluation
from ostinato.flows.reporting.suite_report import suite_figures
from ostinato.flows.stages import chain, realtime
from ostinato.flows.stages.checkpoints import NEWEST, has_trained
from ostinato.flows.stages.events import send_evaluation_skipped, send_gate_event
from ostinato.flows.stages.forms import CheckpointName, Options, ProblemSet, RecipeName, Seed, Suite
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.flows.stages.suites import open_suite, publish_suite
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.evaluation.gates import gate_candidate

logger = logging.getLogger(__name__)

SKIPPED = "Skipped"  # name of the final state when there was nothing to evaluate


@flow(name="checkpoint-evaluation", flow_run_name=run_name)
def checkpoint_evaluation(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    checkpoint: CheckpointName = NEWEST,
    suite: Suite | str = Suite.BOTH.value,
    against: CheckpointName | None = None,
    problems: ProblemSet = None,
    endpoint: Endpoint | None = None,
    commit: str = "",
    report_directory: str | None = None,
    skip_untrained: bool = False,
    options: Options = None,
) -> State:
    """Scores a checkpoint on held-out problems and compares it with another one. Trains nothing. A checkpoint
    is scored once per suite; later runs reuse the scorecard.

    Args:
        checkpoint: champion, newest (the recipe's), or kind/name@version.
        suite: held-out splits to score on, of which the gate judges on the first, or a suite: its folder, or
            its name in the home.
        against: checkpoint to compare with; the champion of the recipe's serving line when absent.
        endpoint: a model that somebody else serves, scored in place of the checkpoint as an outside
            baseline: shown with the other checkpoint's scorecard, judged by no gate.
        commit: commit or job that requested the evaluation, shown in the report.
        report_directory: folder that also receives scorecard.json and scorecard.md.
        skip_untrained: ends as Skipped, not as an error, while there is no newest checkpoint.
    """
    context = StageContext.open(recipe, seed, options, may_train=False)
    if skip_untrained and checkpoint == NEWEST and not has_trained(context.recipe, context.ledger):
        return _skip(context.recipe.name)
    opened = open_suite(context.settings, suite, context.recipe.cycle.gate)
    if opened is not None and problems is not None:
        raise ConfigError(f"problems {problems} with suite {suite}, wanted one of them")
    scored = (
        context.checkpoint_named(checkpoint)
        if endpoint is None
        else chain.endpoint_artifact(context, endpoint)
    )
    other = context.checkpoint_named(against) if against else realtime.champion_of(context)
    splits = Suite(suite).splits if opened is None else (None,)
    problems = (
        publish_suite(context, *opened) if opened else problems_for(context, problems, recipe, seed)
    )
    suite_card = opened[0] if opened else None
    cards = [chain.evaluate(context, problems, scored, split, suite_card) for split in splits]
    notes = [note_overlap(context, scored, problems, split) for split in splits]
    held_against = (
        None if other is None else chain.evaluate(context, problems, other, splits[0], suite_card)
    )
    decision = None
    if endpoint is None:
        decision = gate_candidate(cards[0], held_against, context.recipe.cycle.gate)
    if other is not None and held_against is not None and (endpoint or opened):
        cards.append(held_against)
        notes.append(note_overlap(context, other, problems, splits[0]))
    report = EvaluationReport(
        checkpoint=str(scored) if endpoint is None else endpoint.title,
        against=None if other is None else str(other),
        suite=cards[0].suite if opened else suite,
        commit=commit,
        recipe=context.recipe.name,
        seed=context.recipe.seed,
        scorecards=tuple(cards),
        in_training_text=tuple(notes),
        decision=decision,
        figures=suite_figures(context, cards) if opened else None,
    )
    if decision is not None:
        parameters = {"recipe": recipe, "seed": seed, "problems": str(problems)}
        parameters |= {"options": context.options.model_dump(mode="json")}
        # a promotion judges on the recipe's own problems, not on a suite
        is_offered = opened is None and _is_for_users(context, scored)
        send_gate_event(report.checkpoint, decision, parameters if is_offered else None)
    directory = None if report_directory is None else Path(report_directory)
    show_evaluation(report, directory, held_against)
    if decision is None:
        return Completed(message="an outside baseline is scored, not judged")
    if decision.passed:
        return Completed(message=decision.reason)
    return Failed(name=GATE_FAILED, message=decision.reason)


def _skip(recipe: str) -> State:
    reason = f"nothing to evaluate yet: recipe {recipe} has no trained checkpoint"
    logger.info("evaluation=skipped %s", reason)
    send_evaluation_skipped(recipe, reason)
    return Completed(name=SKIPPED, message=reason)


def _is_for_users(context: StageContext, scored: ArtifactRef) -> bool:
    """Whether a checkpoint that passes here is offered to the serving line automatically."""
    if context.recipe.serving.line is None or not context.recipe.serving.promote_evaluated:
        return False
    return not realtime.serving_line(context).was_offered(str(scored))
