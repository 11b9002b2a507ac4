"""Base models side by side, by the command: measured once, whatever template they have."""

import json
from pathlib import Path

import pytest

from ostinato.flows.base_selection import base_selection, held_out_sources
from ostinato.flows.commands.models import import_model
from ostinato.flows.commands.run_flow import main as run_flow
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import load_settings
from ostinato.tasks.evaluation.base_models.config import BaseMeasures
from ostinato.tasks.records import Split
from tests.fakes.finished_stages import add_own_problems, open_context
from tests.fakes.miniature import make_checkpoint, make_problem_set
from tests.fakes.published_model import write_published_model
from tests.flows.test_checkpoint_evaluation import problems_result

AMOUNTS = """
[base_selection]
humaneval_problems = 2
answer_tokens = 8
tracked_files = 2
tracked_lines = 4
tracked_patches = 1
window_tokens = 64
"""


@pytest.mark.nightly
def test_models_are_measured_once(prefect_server: None, home: Path, tmp_path: Path) -> None:
    context = open_context(tmp_path, "mine", AMOUNTS)

    def publish(folder: Path) -> tuple[Path, dict]:
        directory = make_problem_set(folder / "published", Split.HELD_OUT)
        return directory, {"summary": problems_result()}

    add_own_problems(context, publish)
    own = context.ensure("reinforcement", {}, (), lambda it: (make_checkpoint(it / "made"), {}))
    write_published_model(tmp_path / "theirs", max_position_embeddings=1024)
    names = [str(own), str(import_model(load_settings(), str(tmp_path / "theirs"), "theirs"))]
    command = ["base_selection", "--recipe", str(tmp_path / "mine.toml"), "--parameters"]
    for _ in range(2):
        assert run_flow([*command, json.dumps({"checkpoints": names})]) == 0
    rows = open_ledger(load_settings()).artifacts.list("base-measures")
    assert len(rows) == 2
    found = [
        BaseMeasures.model_validate_json(path.read_bytes())
        for path in (home / "objects").rglob("measures.json")
    ]
    assert {one.knowledge.form for one in found} == {"completion", "chat"}
    assert all(one.codebase.source_bytes == found[0].codebase.source_bytes for one in found)


def test_a_form_without_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="checkpoints is empty"):
        base_selection.fn()


def test_code_is_that_of_repositories_that_nothing_was_trained_on(tmp_path: Path) -> None:
    trained = make_problem_set(tmp_path / "trained", Split.TRAIN)
    held_out = make_problem_set(tmp_path / "held-out", Split.HELD_OUT)
    files = [Path(path).name for path in held_out_sources(held_out)]
    assert files == ["__init__.py", "code.py"]  # product code alone, in order
    # where all are trained on, there is no other code
    assert [Path(path).name for path in held_out_sources(trained)] == files
