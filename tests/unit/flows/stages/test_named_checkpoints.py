"""A flow takes a checkpoint by a reference or by any of its names."""

import re
from pathlib import Path

import pytest
from prefect.utilities.callables import parameter_schema

from ostinato.flows.reinforcement import reinforcement
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from tests.fakes.finished_stages import open_context


def test_reference_and_names_are_taken(tmp_path: Path) -> None:
    context = open_context(tmp_path, "mine")
    given = ArtifactRef(
        kind="candidate", name="mine", version=3, fingerprint="f", object_prefix="p"
    )
    assert context.checkpoint(given) is given
    assert context.checkpoint(None) is None
    for name in ("champion", "newest", "candidate/mine@3"):
        with pytest.raises(ConfigError):
            context.checkpoint(name)


def test_form_takes_the_names_too() -> None:
    start = parameter_schema(reinforcement).properties["start"]
    patterns = [kind["pattern"] for kind in start["anyOf"] if "pattern" in kind]
    for name in ("champion", "newest", "candidate/mine@3"):
        assert any(re.search(pattern, name) for pattern in patterns), name
    assert not any(re.search(pattern, "the best") for pattern in patterns)
