"""The search ablation as functions from a context and parents to artifacts.

Owns what both arms share (problems, encoder, continued pretraining), what each arm does for itself
(its transcripts and its evaluation, under its own recipe NAME_with or NAME_without), and the
comparison that is published. Flows call these. No arithmetic happens here.
"""

import json
from pathlib import Path

from flows import chain, search_chain
from flows.child_task import run_stage
from flows.recipe import load_recipe
from flows.stage import StageContext
from infra.artifacts import ArtifactRef
from tasks.evaluation.locating import ArmComparison, LocatingRow, compare_arms
from tasks.evaluation.run import EvaluationResult
from tasks.records import Split

ARMS = ("with", "without")
ROWS_FILE = "locating.json"
COMPARISON_FILE = "comparison.json"
SEARCH_TOOL = "codebase_search"


def open_arm(context: StageContext, arm: str) -> StageContext:
    """The context of one arm: the recipe of that name under the same seed."""
    recipe = load_recipe(f"{context.recipe.name}_{arm}", seed=context.recipe.seed)
    return StageContext.open(recipe)


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
    search = _encoder_of(arm, encoder)

    def build(directory: Path) -> tuple[Path, dict]:
        plain = chain.evaluation_request(arm, problems, checkpoint, Split.HELD_OUT)
        evaluation = plain.evaluation.model_copy(
            update={
                "search_directory": None if search is None else str(arm.directory_of(search)),
                "context_tokens": arm.recipe.harness.context_tokens,
                "notes_locating": True,
            }
        )
        request = plain.model_copy(update={"evaluation": evaluation})
        name, entry = f"evaluation of {arm.recipe.name}", "flows.drivers.evaluation:main"
        result = run_stage(name, entry, request, EvaluationResult, directory)
        rows = [row.model_dump(mode="json") for row in result.locating]
        summary = {
            "wall_seconds": result.wall_seconds,
            "average": result.scorecard.average.model_dump(),
        }
        return chain.one_file(directory, ROWS_FILE, json.dumps(rows)), {chain.SUMMARY: summary}

    parents = (problems, checkpoint) if search is None else (problems, checkpoint, search)
    identity = chain.evaluation_identity(arm.recipe, Split.HELD_OUT)
    return arm.ensure("locating", identity, parents, build)


def compare(context: StageContext, arms: dict[str, ArtifactRef]) -> ArtifactRef:
    """Rows of both arms -> the published comparison."""
    confidence = context.recipe.evaluation.confidence

    def build(directory: Path) -> tuple[Path, dict]:
        rows = {name: _read_rows(context, ref) for name, ref in arms.items()}
        found = compare_arms(rows["with"], rows["without"], confidence=confidence)
        made = chain.one_file(directory, COMPARISON_FILE, found.model_dump_json(indent=1))
        return made, {chain.SUMMARY: found.model_dump(mode="json")}

    identity = {"confidence": confidence}
    return context.ensure("search-ablation", identity, [arms[name] for name in ARMS], build)


def read_comparison(context: StageContext, ref: ArtifactRef) -> ArmComparison:
    """What `compare` published."""
    return ArmComparison.model_validate(chain.summary_of(context, ref))


def newest_comparison(context: StageContext) -> ArtifactRef | None:
    """What was published last under the recipe's name; None before there is anything."""
    rows = context.ledger.artifacts.list("search-ablation", context.recipe.name)
    newest = max(rows, key=lambda row: row.version, default=None)
    if newest is None:
        return None
    return context.artifacts.get(f"{newest.kind}/{newest.name}@{newest.version}")


def train_encoder(context: StageContext) -> ArtifactRef:
    """The encoder of the search service, from code alone: no trajectory teaches it."""
    return search_chain.train_encoder(context, None, None)


def _encoder_of(arm: StageContext, encoder: ArtifactRef) -> ArtifactRef | None:
    return encoder if SEARCH_TOOL in arm.recipe.harness.tools else None


def _read_rows(context: StageContext, ref: ArtifactRef) -> list[LocatingRow]:
    rows = json.loads((context.directory_of(ref) / ROWS_FILE).read_text())
    return [LocatingRow.model_validate(row) for row in rows]
