"""The search ablation as functions from a context and parents to artifacts.

Owns what both arms share (problems, encoder, continued pretraining), what each arm does for itself
under its own recipe NAME_with or NAME_without, and the comparisons that are published: of agents
that learned to locate, and of the demonstrator's locating before a repair by the shared model.
Flows call these. No arithmetic happens here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows import chain, search_chain
from flows.child_task import run_stage
from flows.drivers.scripted_locating import ScriptedLocatingRequest, ScriptedLocatingResult
from flows.recipe import load_recipe
from flows.stage import StageContext
from infra.artifacts import ArtifactRef
from tasks.evaluation.locating import ArmComparison, LocatingRow, compare_arms
from tasks.evaluation.run import EvaluationResult
from tasks.records import Split

ARMS = ("with", "without")
POLICIES = ("scripted", "trained")  # who locates; the repair is a trained model's in both
ROWS_FILE = "locating.json"
COMPARISON_FILE = "comparisons.json"
KIND = "search-ablation"
SEARCH_TOOL = "codebase_search"
Refs = Mapping[str, ArtifactRef]


def open_arm(context: StageContext, recipe: str, arm: str) -> StageContext:
    """The context of one arm of `recipe`, a name or a path: the one called the same with _ARM,
    under the same seed.
    """
    stem = recipe.removesuffix(".toml")
    name = f"{stem}_{arm}" + recipe.removeprefix(stem)
    return StageContext.open(load_recipe(name, seed=context.recipe.seed))


def train_encoder(context: StageContext) -> ArtifactRef:
    """The encoder of the search service, from code alone: no trajectory teaches it."""
    return search_chain.train_encoder(context, None, None)


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
    changes = {} if search is None else {"search_directory": str(arm.directory_of(search))}
    parents = (problems, checkpoint) if search is None else (problems, checkpoint, search)
    return _evaluate(arm, problems, checkpoint, parents, changes)


def evaluate_named(
    context: StageContext, problems: ArtifactRef, checkpoint: ArtifactRef
) -> ArtifactRef:
    """The shared checkpoint on the same problems, told the function -> a row an attempt."""
    changes = {"names_functions": True}
    return _evaluate(context, problems, checkpoint, (problems, checkpoint), changes)


def _evaluate(
    context: StageContext,
    problems: ArtifactRef,
    checkpoint: ArtifactRef,
    parents: tuple[ArtifactRef, ...],
    changes: dict[str, Any],
) -> ArtifactRef:
    recipe = context.recipe

    def build(directory: Path) -> tuple[Path, dict]:
        plain = chain.evaluation_request(context, problems, checkpoint, Split.HELD_OUT)
        evaluation = plain.evaluation.model_copy(
            update={
                "context_tokens": recipe.harness.context_tokens,
                "notes_locating": True,
                **changes,
            }
        )
        request = plain.model_copy(update={"evaluation": evaluation})
        name, entry = f"evaluation of {recipe.name}", "flows.drivers.evaluation:main"
        result = run_stage(name, entry, request, EvaluationResult, directory)
        summary = {
            "wall_seconds": result.wall_seconds,
            "average": result.scorecard.average.model_dump(),
        }
        return _rows_file(directory, result.locating), {chain.SUMMARY: summary}

    identity = chain.evaluation_identity(recipe, Split.HELD_OUT)
    return context.ensure("locating", identity, parents, build)


def locate_by_script(
    arm: StageContext,
    problems: ArtifactRef,
    encoder: ArtifactRef,
    checkpoint: ArtifactRef,
    named: ArtifactRef,
) -> ArtifactRef:
    """Attempts of `evaluate_named` -> the same behind the arm's scripted locating."""
    search = _encoder_of(arm, encoder)
    way = arm.recipe.corpus.demonstrations.locating

    def build(directory: Path) -> tuple[Path, dict]:
        request = ScriptedLocatingRequest(
            way=way,
            problems_directory=str(arm.directory_of(problems)),
            tokenizer_directory=str(arm.directory_of(checkpoint)),
            search_directory=None if search is None else str(arm.directory_of(search)),
            result_limit_characters=arm.recipe.harness.result_limit_characters,
            attempts=tuple(_read_rows(arm, named)),
        )
        name, entry = f"scripted locating by {way}", "flows.drivers.scripted_locating:main"
        result = run_stage(name, entry, request, ScriptedLocatingResult, directory)
        return _rows_file(directory, result.rows), {chain.SUMMARY: {"rows": len(result.rows)}}

    parents = (problems, named) if search is None else (problems, named, search)
    identity = {"way": way, "harness": arm.recipe.harness}
    return arm.ensure("scripted-locating", identity, parents, build)


def compare(context: StageContext, scripted: Refs, trained: Refs) -> ArtifactRef:
    """Rows of both arms under both policies -> the published comparisons."""
    confidence = context.recipe.evaluation.confidence

    def build(directory: Path) -> tuple[Path, dict]:
        found = {}
        for policy, arms in zip(POLICIES, (scripted, trained), strict=True):
            rows = {name: _read_rows(context, ref) for name, ref in arms.items()}
            compared = compare_arms(rows["with"], rows["without"], confidence=confidence)
            found[policy] = compared.model_dump(mode="json")
        text = json.dumps(found, indent=1)
        return chain.one_file(directory, COMPARISON_FILE, text), {chain.SUMMARY: found}

    parents = [arms[name] for arms in (scripted, trained) for name in ARMS]
    return context.ensure(KIND, {"confidence": confidence}, parents, build)


def read_comparisons(context: StageContext, ref: ArtifactRef) -> dict[str, ArmComparison]:
    """What `compare` published, by policy."""
    found = chain.summary_of(context, ref)
    return {policy: ArmComparison.model_validate(found[policy]) for policy in POLICIES}


def newest_comparison(context: StageContext) -> ArtifactRef | None:
    """What was published last under the recipe's name; None before there is anything."""
    rows = context.ledger.artifacts.list(KIND, context.recipe.name)
    newest = max(rows, key=lambda row: row.version, default=None)
    if newest is None:
        return None
    return context.artifacts.get(f"{newest.kind}/{newest.name}@{newest.version}")


def _encoder_of(arm: StageContext, encoder: ArtifactRef) -> ArtifactRef | None:
    return encoder if SEARCH_TOOL in arm.recipe.harness.tools else None


def _rows_file(directory: Path, rows: tuple[LocatingRow, ...]) -> Path:
    text = json.dumps([row.model_dump(mode="json") for row in rows])
    return chain.one_file(directory, ROWS_FILE, text)


def _read_rows(context: StageContext, ref: ArtifactRef) -> list[LocatingRow]:
    rows = json.loads((context.directory_of(ref) / ROWS_FILE).read_text())
    return [LocatingRow.model_validate(row) for row in rows]
