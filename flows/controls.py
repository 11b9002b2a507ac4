"""Flow: what the checkpoint that RL began with does with as many tokens."""

import json
from pathlib import Path

from prefect import flow

from ostinato.flows.mtp_distillation import mtp_distillation
from ostinato.flows.problem_building import problem_building
from ostinato.flows.reinforcement import reinforcement
from ostinato.flows.reporting.control_rows import read_rows, show_controls
from ostinato.flows.stages import chain
from ostinato.flows.stages.forms import RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.run_options import Options
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.evaluation.controls import ControlReport, compare_with_controls
from ostinato.tasks.records import Split


@flow(name="controls", flow_run_name=run_name)
def controls(
    recipe: RecipeName = "nano", seed: Seed = None, options: Options = None
) -> ArtifactRef:
    """Evaluates a checkpoint before and after RL and compares at equal tokens. Returns the table."""
    context = StageContext.open(recipe, seed, options)
    problems = problem_building(recipe, seed, options=context.options)
    start = mtp_distillation(recipe, seed, problems, options=context.options)
    trained = reinforcement(recipe, seed, problems, start, options=context.options)
    rows = [
        chain.evaluation(context, problems, checkpoint, Split.HELD_OUT)
        for checkpoint in (start, trained)
    ]
    report = compare(context, rows[0], rows[1])
    show_controls(chain.result_of(context, report, ControlReport))
    return report


def compare(context: StageContext, start: ArtifactRef, trained: ArtifactRef) -> ArtifactRef:
    """Two evaluations -> the published report."""

    def build(directory: Path) -> tuple[Path, dict]:
        report = compare_with_controls(read_rows(context, start), read_rows(context, trained))
        found = report.model_dump(mode="json")
        text = json.dumps(found, indent=1)
        return chain.one_file(directory, "controls.json", text), {chain.SUMMARY: found}

    return context.ensure("controls", {}, (start, trained), build)
