"""Declared stages: a setting reaches the requests that hold its table, and decides the identity of those stages alone."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ostinato.flows.recipe import Recipe, load_recipe
from ostinato.flows.stages.declared import CANDIDATE, PRETRAINING, STAGES, ChildStage

CHILDREN = [
    stage for stage in STAGES.values() if isinstance(stage, ChildStage) and stage is not CANDIDATE
]


def requests_of(recipe: Recipe) -> dict[str, BaseModel]:
    """Requests by stage, with stand-ins for what a flow gives."""
    given: dict[str, dict[str, Any]] = {
        "problems": {"archives_directory": Path("archives")},
        "reinforcement": {"run_id": "", **dict(recipe.reinforcement)},
        "evaluation": {"checkpoint_name": "pretrained/miniature@1"},
        "probing": {"checkpoint_name": "pretrained/miniature@1"},
        "own-stage": {"stage_name": "rounded", "settings": {}},
        "base-selection": {"sources": (), "humaneval": ""},
        "format-trial": {"formats": ({"dialect": "hermes"},)},
    }
    requests = {}
    for stage in CHILDREN:
        folders = {
            f"{name}_directory" for name in stage.parents
        } & stage.request.model_fields.keys()
        fields = given.get(stage.name, {}) | dict.fromkeys(folders, "somewhere")
        requests[stage.name] = stage.request_of(recipe, fields)
    return requests


def changed_stages(override: str) -> tuple[set[str], set[str]]:
    """Stages with another request and stages with another identity when a setting changes."""
    before = requests_of(load_recipe("miniature"))
    after = requests_of(load_recipe("miniature", overrides=[override]))
    return (
        {name for name in before if before[name] != after[name]},
        {
            stage.name
            for stage in CHILDREN
            if stage.identity_of(before[stage.name]) != stage.identity_of(after[stage.name])
        },
    )


@pytest.mark.parametrize(
    ("override", "stages"),
    [
        ("learning.optimizer.learning_rate=3e-4", {"reinforcement"}),
        ("reinforcement.max_steps=3", {"reinforcement"}),
        ("corpus.held_out_share=0.2", {"corpus"}),
        ("retrieval.contrastive.epochs=7", {"retrieval"}),
        (
            "harness.max_turns=3",
            {"corpus", "probing", "reinforcement", "evaluation", "format-trial"},
        ),
        (
            "sandbox.egress.allow=['index']",
            {"probing", "reinforcement", "evaluation", "format-trial"},
        ),
    ],
)
def test_a_setting_decides_the_stages_whose_request_holds_it(
    override: str, stages: set[str]
) -> None:
    assert changed_stages(override) == (stages, stages)


def test_where_a_stage_runs_decides_nothing_of_what_it_makes() -> None:
    assert changed_stages("learning.world_size=2") == ({"reinforcement"}, set())
    request = requests_of(load_recipe("miniature"))["pretraining"]
    moved = request.model_copy(update={"corpus_directory": "elsewhere"})
    assert PRETRAINING.identity_of(moved) == PRETRAINING.identity_of(request)
