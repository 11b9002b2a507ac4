"""`ostinato import` and `ostinato export`, as they are typed."""

from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.infra.platform.errors import ConfigError
from tests.fakes.published_model import write_published_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(word) for word in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def logits(directory: Path) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.tensor([tokenizer("def add(a, b):\n    return a + b")["input_ids"]])
    with torch.no_grad():
        return model(ids).logits


def test_a_model_goes_in_by_a_name_and_out_by_the_reference_that_was_printed(
    tmp_path: Path,
) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    write_published_model(published)
    reference = run("import", published, "--as", "small").splitlines()[-1].split()[-1]
    assert reference == "checkpoint/small@1"
    run("export", reference, out)
    assert torch.equal(logits(out), logits(published))


def test_a_refused_gguf_leaves_nothing_in_the_way_of_the_export_without(tmp_path: Path) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    write_published_model(published, model_type="qwen3_moe", decoder_sparse_step=1, **fields)
    reference = run("import", published, "--as", "experts").splitlines()[-1].split()[-1]
    with pytest.raises(ConfigError, match="without --gguf the directory is written"):
        run("export", reference, out, "--gguf")
    run("export", reference, out)
    assert torch.allclose(logits(out), logits(published), atol=1e-5)
