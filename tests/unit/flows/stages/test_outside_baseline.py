"""A model behind an endpoint stands for a checkpoint in evaluations, and nowhere else."""

from pathlib import Path

import pytest

from ostinato.flows.stages import chain
from ostinato.flows.stages.checkpoints import checkpoint_named
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.records import Split
from tests.fakes.finished_stages import add_problems, open_context

OUTSIDE = Endpoint(url="https://host/v1", model="m", key_env="KEY")


def test_it_is_scored_in_the_full_dialect_and_never_promoted(tmp_path: Path) -> None:
    context = open_context(tmp_path, "baseline")
    stands_for = chain.endpoint_artifact(context, OUTSIDE)
    assert chain.endpoint_artifact(context, OUTSIDE) == stands_for
    problems = add_problems(context, "baseline")
    request = chain.evaluation_request(context, problems, stands_for, Split.HELD_OUT)
    assert request.endpoint == OUTSIDE
    assert request.harness.dialect == "full"
    assert request.checkpoint_name == "m at https://host/v1 (outside baseline)"
    with pytest.raises(ConfigError, match="has no weights"):
        checkpoint_named(context.recipe, context.ledger, context.artifacts, str(stands_for))
