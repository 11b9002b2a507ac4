"""Imported models are artifacts that recipes continue from by their reference."""

import contextlib
from pathlib import Path

import pytest

from ostinato.flows.commands.models import export_model, import_model
from ostinato.flows.recipe import base_directory, load_recipe
from ostinato.flows.stages.chain import base_identity
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.ledger.rows import ScorecardRow
from ostinato.infra.platform.settings import load_settings
from ostinato.tasks.records import Metric
from tests.fakes.published_model import write_published_model
from tests.fakes.scorecards import flat_scorecard


def test_recipe_continues_from_an_imported_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    settings = load_settings()
    write_published_model(tmp_path / "Some Model")
    ref = import_model(settings, str(tmp_path / "Some Model"), None)
    assert str(ref) == "checkpoint/some-model@1"
    assert import_model(settings, str(tmp_path / "Some Model"), "some-model") == ref
    with pytest.raises(ConfigError, match=r"context_tokens=512, wanted at most .*tokens=256"):
        load_recipe("nano", overrides=[f"base_checkpoint={ref}"])
    longer = "model.max_sequence_tokens=512"
    recipe = load_recipe("nano", overrides=[f"base_checkpoint={ref}", longer])
    assert recipe.model.num_query_groups == 3
    directory = base_directory(recipe.base_checkpoint)
    assert directory is not None
    assert (directory / "published" / "config.json").is_file()
    assert base_identity(recipe)
    card = flat_scorecard(str(ref), Metric(mean=0.25, low=0.1, high=0.4, count=8))
    with contextlib.closing(open_ledger(settings)) as ledger:
        ledger.scorecards.add(
            ScorecardRow(
                scorecard_id=card.scorecard_id,
                checkpoint_id=str(ref),
                suite=card.suite,
                payload=card.model_dump(mode="json"),
                created_at=1.0,
            )
        )
    export_model(settings, str(ref), tmp_path / "out", None)
    told = (tmp_path / "out" / "README.md").read_text()
    assert f"`{ref}`" in told
    assert f"- {card.suite}: 25.0% [10.0%, 40.0%] solved on average" in told
    with pytest.raises(ConfigError, match="wanted kind/name@version"):
        load_recipe("nano", overrides=["base_checkpoint=checkpoint/nobody@1"])
    with pytest.raises(ConfigError, match="wanted lower-case letters"):
        import_model(settings, str(tmp_path / "Some Model"), "Some Model")
    (tmp_path / "Some Model" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        import_model(settings, str(tmp_path / "Some Model"), "broken")
    assert not list((tmp_path / "home").glob("imports/*"))
    assert not list((tmp_path / "home").rglob("*broken*"))
