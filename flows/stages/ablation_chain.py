"""The arms of the search ablation, each under its own recipe NAME_with or NAME_without."""

import json
from collections.abc import Mapping
from pathlib import Path

from ostinato.flows.recipe import SEARCH_ARMS, arm_recipe
from ostinato.flows.stages import chain
from ostinato.flows.stages.child_task import run_stage
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.evaluation.checkpoint.records import EvaluationResult
from ostinato.tasks.evaluation.locating import LocatingRow, compare_arms
from ostinato.tasks.records import Split

ROWS_FILE = "locating.json"
COMPARISON_FILE = "comparison.json"


def open_arm(context: StageContext, recipe: str, arm: str) -> StageContext:
    """Context of one arm of `recipe`, under the same seed."""
    return StageContext.open(arm_recipe(recipe, arm), context.recipe.seed, context.options)


def evaluate_arm(arm: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef) -> ArtifactRef:
    """The arm's checkpoint on held-out problems -> one row per attempt."""
    recipe = arm.recipe

    def build(directory: Path) -> tuple[Path, dict]:
        plain = chain.evaluation_request(arm, problems, checkpoint, Split.HELD_OUT)
        notes = {"context_tokens": recipe.harness.context_tokens, "notes_locating": True}
        request = plain.model_copy(update=notes)
        entry = "ostinato.tasks.evaluation.checkpoint.run:main"
        name = f"evaluation of {recipe.name}"
        result = run_stage(name, entry, request, EvaluationResult, directory)
        text = json.dumps([row.model_dump(mode="json") for row in result.locating])
        summary = {
            "wall_seconds": result.wall_seconds,
            "broken_call_ratio": result.scorecard.broken_call_ratio,
            "average": result.scorecard.average.model_dump(),
        }
        return chain.one_file(directory, ROWS_FILE, text), {chain.SUMMARY: summary}

    identity = chain.evaluation_identity(recipe, Split.HELD_OUT)
    parents = (problems, checkpoint, *chain.encoders_of(arm))
    return arm.ensure("locating", identity, parents, build)


def compare(context: StageContext, rows: Mapping[str, ArtifactRef]) -> ArtifactRef:
    """Rows of both arms -> the published comparison."""
    confidence = context.recipe.evaluation.confidence

    def build(directory: Path) -> tuple[Path, dict]:
        first, second = (_read_rows(context, rows[name]) for name in SEARCH_ARMS)
        found = compare_arms(first, second, confidence=confidence).model_dump(mode="json")
        text = json.dumps(found, indent=1)
        return chain.one_file(directory, COMPARISON_FILE, text), {chain.SUMMARY: found}

    parents = tuple(rows[name] for name in SEARCH_ARMS)
    return context.ensure("comparison", {"confidence": confidence}, parents, build)


def _read_rows(context: StageContext, ref: ArtifactRef) -> list[LocatingRow]:
    rows = json.loads((context.directory_of(ref) / ROWS_FILE).read_text())
    return [LocatingRow.model_validate(row) for row in rows]
