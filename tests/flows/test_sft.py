"""Fine-tuning on a user's own conversations, from the command line to a checkpoint."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.flows.sft import sft
from ostinato.flows.stages import chain
from ostinato.flows.stages.forms import RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.errors import ConfigError
from ostinato.models.checkpoint import load_checkpoint
from ostinato.tasks.pretraining.config import PretrainingResult


def write_conversations(path: Path, num: int) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Say the word for {number % 4}."},
                {"role": "assistant", "content": ("zero", "one", "two", "three")[number % 4]},
            ]
        }
        for number in range(num)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_conversations_are_learned_and_the_same_file_is_learned_once(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    data = write_conversations(tmp_path / "told.jsonl", 60)
    tuned = sft("miniature", data=str(data))
    context = StageContext.open("miniature")
    result = chain.result_of(context, tuned, PretrainingResult)
    assert str(tuned) == "pretrained/miniature-sft@1"
    assert result.after.by_source.keys() == {"conversations"}
    assert result.after.perplexity < 0.8 * result.before.perplexity
    assert load_checkpoint(context.directory_of(tuned)).spec == context.recipe.model

    assert sft("miniature", data=str(data)) == tuned
    data.write_text(data.read_text().replace("zero", "nought"))
    lora = RunOptions(overrides=("pretraining.lora.rank=4",))
    adapted = sft("miniature", data=str(data), options=lora)
    assert str(adapted) == "pretrained/miniature-sft@2"
    assert len(context.ledger.artifacts.list("corpus")) == 2  # one of each text
    place = str(tmp_path / "adapter")
    told = CliRunner().invoke(app, ["export", str(tuned), place, "--adapter"])
    assert "was trained without adapters" in str(told.exception)
    told = CliRunner().invoke(app, ["export", str(adapted), place, "--adapter"])
    assert told.exit_code == 0, told.output
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_data_goes_with_sft_alone(tmp_path: Path, home: Path) -> None:
    data = write_conversations(tmp_path / "told.jsonl", 2)
    for arguments in (["sft"], ["reinforcement", "--data", str(data)]):
        found = CliRunner().invoke(app, ["run", *arguments, "--recipe", "miniature"])
        assert found.exit_code == 2
        assert "no other flow takes it" in found.output
    assert not (home / "prefect").exists()


ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is not a file"),
        ("", "holds no conversation"),
        (json.dumps(ROW) + '\n{"text": "b"}\n', "row 2: no field messages"),
    ],
)
def test_a_bad_file_is_refused_before_a_server_starts(
    text: str | None, says: str, home: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    command = ["run", "sft", "--recipe", "miniature", "--data", str(file)]
    found = CliRunner().invoke(app, command)
    assert isinstance(found.exception, ConfigError)  # exit code 2 of the command
    assert says in str(found.exception)
    assert not (home / "prefect").exists()


def test_start_goes_with_reinforcement_alone_and_must_exist(home: Path) -> None:
    for name, wanted in (("sft", "needs --data"), ("controls", "reinforcement takes --start")):
        command = ["run", name, "--recipe", "miniature", "--start", "checkpoint/mine@1"]
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 2
        assert wanted in found.output
    command = ["run", "reinforcement", "--recipe", "miniature", "--start", "checkpoint/mine@1"]
    found = CliRunner().invoke(app, command)
    assert "checkpoint/mine@1" in str(found.exception)
    assert isinstance(found.exception, ConfigError)
    assert not (home / "prefect").exists()


def test_file_that_is_none_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a file, wanted a \.jsonl"):
        sft.fn("miniature", data="nowhere.jsonl")


def test_a_bad_row_is_refused_before_anything_starts(tmp_path: Path, home: Path) -> None:
    data = write_conversations(tmp_path / "told.jsonl", 2)
    data.write_text(data.read_text() + '\n{"messages": [{"role": "user", "content": null}]}')
    with pytest.raises(ConfigError, match=r"row 3: messages.0: content is null or absent"):
        sft.fn("miniature", data=str(data))
