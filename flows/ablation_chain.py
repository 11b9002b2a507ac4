"""The search ablation as functions from a context and parents to artifacts.

What both arms share (problems, encoder, continued pretraining), what each arm does for itself under
its own recipe NAME_with or NAME_without, and the comparison that is published. Flows call these. No
arithmetic happens here.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from ostinato.flows import chain
from ostinato.flows.child_task import run_stage
from ostinato.flows.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.checkpoint_evaluation.records import EvaluationResult
from ostinato.tasks.evaluation.locating import ArmComparison, LocatingRow, compare_arms
from ostinato.tasks.records import Split

ARMS = ("with", "without")
ROWS_FILE = "locating.json"
COMPARISON_FILE = "comparison.json"
KIND = "search-ablation"
SEARCH_TOOL = "codebase_search"


def open_arm(context: StageContext, recipe: str, arm: str) -> StageContext:
    """The context of one arm of `recipe`, a name or a path: the one called the same with _ARM,
    under the same seed.
    """
    stem = recipe.removesuffix(".toml")
    name = f"{stem}_{arm}" + recipe.removeprefix(stem)
    return StageContext.open(name, context.recipe.seed, context.options)


def train_arm(
    arm: StageContext, problems: ArtifactRef, encoder: ArtifactRef, start: ArtifactRef
) -> ArtifactRef:
    """Demonstrations with the arm's tools -> the shared checkpoint trained on them."""
    corpus = chain.build_corpus(arm, problems, _encoder_of(arm, encoder))
    return chain.pretrain(arm, corpus, start)


def evaluate_arm(
    arm: StageContext, problems: ArtifactRef, encoder: ArtifactRef, checkpoint: ArtifactRef
) -> ArtifactRef:
    """The arm's checkpoint on held-out problems -> a row an attempt."""
    recipe = arm.recipe
    search = _encoder_of(arm, encoder)

    def build(directory: Path) -> tuple[Path, dict]:
        plain = chain.evaluation_request(arm, problems, checkpoint, Split.HELD_OUT)
        request = plain.model_copy(
            update={
                "context_tokens": recipe.harness.context_tokens,
                "notes_locating": True,
                "search_directory": None if search is None else str(arm.directory_of(search)),
            }
        )
        name, entry = (
            f"evaluation of {recipe.name}",
            "ostinato.tasks.checkpoint_evaluation.run:main",
        )
        result = run_stage(name, entry, request, EvaluationResult, directory)
        text = json.dumps([row.model_dump(mode="json") for row in result.locating])
        summary = {
            "wall_seconds": result.wall_seconds,
            "broken_call_ratio": result.scorecard.broken_call_ratio,
            "average": result.scorecard.average.model_dump(),
        }
        return chain.one_file(directory, ROWS_FILE, text), {chain.SUMMARY: summary}

    identity = chain.evaluation_identity(recipe, Split.HELD_OUT)
    parents = (problems, checkpoint) if search is None else (problems, checkpoint, search)
    return arm.ensure("locating", identity, parents, build)


def compare(context: StageContext, rows: Mapping[str, ArtifactRef]) -> ArtifactRef:
    """Rows of both arms -> the published comparison."""
    confidence = context.recipe.evaluation.confidence

    def build(directory: Path) -> tuple[Path, dict]:
        first, second = (_read_rows(context, rows[name]) for name in ARMS)
        found = compare_arms(first, second, confidence=confidence).model_dump(mode="json")
        text = json.dumps(found, indent=1)
        return chain.one_file(directory, COMPARISON_FILE, text), {chain.SUMMARY: found}

    parents = tuple(rows[name] for name in ARMS)
    return context.ensure("comparison", {"confidence": confidence}, parents, build)


def read_comparison(context: StageContext, ref: ArtifactRef) -> ArmComparison:
    """The comparison that `compare` published."""
    return ArmComparison.model_validate(chain.summary_of(context, ref))


def newest_comparison(context: StageContext) -> ArtifactRef | None:
    """Newest comparison published under the recipe's name. None before the first."""
    rows = context.ledger.artifacts.list(KIND, context.recipe.name)
    newest = max(rows, key=lambda row: row.version, default=None)
    if newest is None:
        return None
    return context.artifacts.get(f"{newest.kind}/{newest.name}@{newest.version}")


def _encoder_of(arm: StageContext, encoder: ArtifactRef) -> ArtifactRef | None:
    return encoder if SEARCH_TOOL in arm.recipe.harness.tools else None


def _read_rows(context: StageContext, ref: ArtifactRef) -> list[LocatingRow]:
    rows = json.loads((context.directory_of(ref) / ROWS_FILE).read_text())
    return [LocatingRow.model_validate(row) for row in rows]
