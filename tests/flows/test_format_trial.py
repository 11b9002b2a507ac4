"""`ostinato try`: an imported model in each format, by the flow, and the counts and attempts that it shows."""

import json
from pathlib import Path

import pytest

from ostinato.flows.commands.models import import_model
from ostinato.flows.commands.run_flow import main as run_flow
from ostinato.flows.format_trial import format_trial, formats_to_try
from ostinato.flows.stages.forms import RunOptions
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import load_settings
from ostinato.tasks.evaluation.formats.config import FormatTrialResult
from ostinato.tasks.records import Split
from tests.fakes.finished_stages import add_own_problems, open_context
from tests.fakes.foreign_programs import python_program
from tests.fakes.miniature import make_checkpoint, make_problem_set
from tests.fakes.published_model import write_published_model
from tests.flows.test_checkpoint_evaluation import problems_result

AMOUNTS = """
[format_trial]
problems = 2
seconds = 90.0

[harness]
dialect = "full"
tools = ["edit_file"]
max_turns = 1
max_generated_tokens = 16
context_tokens = 512
"""


def run_trial(tmp_path: Path, home: Path, text: str, dialects: list[str]) -> FormatTrialResult:
    """The result of `ostinato try` with the recipe `text` on a small untrained model of others."""
    context = open_context(tmp_path, "mine", text)

    def publish(folder: Path) -> tuple[Path, dict]:
        directory = make_problem_set(folder / "published", Split.TRAIN)
        return directory, {"summary": problems_result()}

    add_own_problems(context, publish)
    write_published_model(tmp_path / "theirs", max_position_embeddings=1024)
    model = str(import_model(load_settings(), str(tmp_path / "theirs"), "theirs"))
    command = ["format_trial", "--recipe", str(tmp_path / "mine.toml"), "--parameters"]
    assert run_flow([*command, json.dumps({"checkpoint": model, "dialects": dialects})]) == 0
    (written,) = (home / "objects").rglob("trial.json")
    return FormatTrialResult.model_validate_json(written.read_bytes())


@pytest.mark.slow
def test_each_format_is_tried_on_the_same_training_problems_and_one_is_recommended(
    prefect_server: None, home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run_trial(tmp_path, home, AMOUNTS, ["mistral"])
    assert {score.format.edits for score in result.scores} == {
        "tool", "whole_function", "search_replace", "udiff",
    }  # fmt: skip
    assert {score.format.dialect for score in result.scores} >= {"mistral"}
    assert len({score.attempts for score in result.scores}) == 1
    assert result.scores[0].attempts > 0
    # an untrained model writes noise: no format may be recommended
    assert result.best.parsed == 0
    assert "no format could be read" in capfd.readouterr().err
    assert all(example.ending == "unread" and example.text for example in result.examples)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_foreign_program_is_tried_in_its_one_form(
    prefect_server: None, home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = python_program(
        "chat([user(PROMPT)], max_tokens=8)\nopen('new.py', 'w').write('a = 1')"
    )
    shape = program.model_dump(include={"command", "environment", "files"})
    tables = [
        f"{name} = {{ {', '.join(f'{json.dumps(key)} = {json.dumps(text)}' for key, text in shape[name].items())} }}"
        for name in ("environment", "files")
    ]
    command = "\n".join(["[harness.command]", f"command = {json.dumps(program.command)}", *tables])
    result = run_trial(tmp_path, home, f'{AMOUNTS}program = "command"\n{command}\n', [])
    (score,) = result.scores
    assert score.format.program == "command"
    assert score.attempts == score.changed == 2
    said = capfd.readouterr().err
    assert "program command: 0 of 2 attempts solved, 2 changed a file" in said
    assert "recommended" not in said


def test_edits_in_plain_answers_are_tried_in_the_dialect_of_the_import_alone() -> None:
    formats = formats_to_try("hermes", ("llama3",))
    tools = [one.dialect for one in formats if one.edits == "tool"]
    assert tools == ["hermes", "llama3"]
    assert {one.dialect for one in formats if one.edits != "tool"} == {"hermes"}
    assert formats_to_try("hermes", ("hermes",)) == formats_to_try("hermes", ())


def test_a_checkpoint_of_our_own_dialect_and_a_form_without_one_are_refused(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    context = open_context(tmp_path, "mine", AMOUNTS)
    own = context.ensure("reinforcement", {}, (), lambda it: (make_checkpoint(it / "made"), {}))
    with pytest.raises(ConfigError, match="compact dialect, wanted an imported model"):
        format_trial.fn(recipe=str(tmp_path / "mine.toml"), checkpoint=str(own))
    foreign = RunOptions(overrides=('harness.program="mini_swe_agent"',))
    with pytest.raises(ConfigError, match=r"dialects is mistral with harness\.program"):
        format_trial.fn("short_repairs", checkpoint=str(own), dialects=["mistral"], options=foreign)
    with pytest.raises(ConfigError, match="checkpoint is empty"):
        format_trial.fn()
    with pytest.raises(ConfigError, match="morse"):
        format_trial.fn(checkpoint=str(own), dialects=["morse"])
