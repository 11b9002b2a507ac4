"""The dialect of an imported model: told by its template, kept with the checkpoint, used where no recipe sets one."""

from pathlib import Path

import pytest

from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages.chain import IMPORTED_HARNESS, harness_for
from ostinato.infra.agent.dialects.published.choice import read_choice
from ostinato.infra.platform.errors import ConfigError
from ostinato.models.rendering import load_renderer
from ostinato.tasks.conversion.importing import import_model
from tests.fakes.published_model import TEMPLATE, TOOL_TEMPLATE, write_published_model


@pytest.mark.parametrize(
    ("template", "wanted", "dialect"),
    [
        (TOOL_TEMPLATE, None, "hermes"),
        (TEMPLATE, None, "full"),
        (TOOL_TEMPLATE, "glm4", "glm4"),
    ],
)
def test_an_import_chooses_the_dialect_that_checkpoints_then_run_in(
    template: str, wanted: str | None, dialect: str, tmp_path: Path
) -> None:
    write_published_model(tmp_path / "in", template)
    facts = import_model(
        str(tmp_path / "in"), tmp_path / "base", tmp_path / "cache", dialect=wanted
    )
    assert facts["dialect"] == dialect
    trained = tmp_path / "trained"
    load_renderer(tmp_path / "base").save(trained)  # as trainers leave it beside their weights
    for checkpoint in (tmp_path / "base", trained):
        assert read_choice(checkpoint) == dialect
        harness = harness_for(load_recipe("miniature"), checkpoint)
        assert harness == IMPORTED_HARNESS.model_copy(update={"dialect": dialect})
        named = load_recipe("miniature", overrides=['harness.dialect="mistral"'])
        assert harness_for(named, checkpoint).dialect == "mistral"


@pytest.mark.parametrize("dialect", ["compact", "nothing"])
def test_a_dialect_that_no_import_can_have_is_refused_before_anything_is_read(
    dialect: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"'{dialect}', wanted"):
        import_model("nowhere", tmp_path / "base", tmp_path / "cache", dialect=dialect)
