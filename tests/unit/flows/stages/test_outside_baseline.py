"""A model behind an endpoint stands for a checkpoint in evaluations, and nowhere else."""

from pathlib import Path

import pytest

from ostinato.flows.stages import chain
from ostinato.flows.stages.checkpoints import checkpoint_named
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.records import Split
from tests.fakes.finished_stages import open_context

OUTSIDE = Endpoint(url="https://host/v1", model="m", key_env="KEY")


def test_it_is_scored_in_the_full_dialect_and_never_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    context = open_context(tmp_path, "baseline")
    stands_for = chain.endpoint_artifact(context, OUTSIDE)
    assert chain.endpoint_artifact(context, OUTSIDE) == stands_for
    fields = chain.evaluation_fields(context, stands_for, Split.HELD_OUT)
    assert fields["endpoint"] == OUTSIDE
    assert fields["harness"].dialect == "full"
    assert fields["checkpoint_name"] == "m at https://host/v1 (outside baseline)"
    with pytest.raises(ConfigError, match="has no weights"):
        checkpoint_named(context.recipe, context.ledger, context.artifacts, str(stands_for))
