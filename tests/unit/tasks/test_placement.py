"""Requests that say where a run is computed: the run goes on when that changes."""

import pytest
from pydantic import BaseModel

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.cluster.workspace import make_envelope
from ostinato.tasks.pretraining.config import PretrainingRequest
from ostinato.tasks.pretraining.mtp.config import MtpRequest
from ostinato.tasks.reinforcement.records import ReinforcementRequest


def make_request(stage: str, *overrides: str) -> BaseModel:
    recipe = load_recipe("nano", overrides=overrides)
    places = {"corpus_directory": "corpus", "checkpoint_directory": "start"}
    if stage == "pretraining":
        return PretrainingRequest(config=recipe.pretraining, **places)
    if stage == "mtp":
        return MtpRequest(config=recipe.mtp, **places)
    return ReinforcementRequest(
        run_id="run",
        checkpoint_directory="start",
        problems_directory="problems",
        learning=recipe.learning,
    )


@pytest.mark.parametrize("stage", ["pretraining", "mtp", "learning"])
def test_a_request_on_other_ranks_is_the_same_run(stage: str) -> None:
    one = make_envelope("entry", make_request(stage, f"{stage}.world_size=1"))
    two = make_envelope("entry", make_request(stage, f"{stage}.world_size=2"))
    other = make_envelope("entry", make_request(stage, f"{stage}.optimizer.weight_decay=0.5"))

    assert one.fingerprint == two.fingerprint != other.fingerprint
    assert one.request != two.request
