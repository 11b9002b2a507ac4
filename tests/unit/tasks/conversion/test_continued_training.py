"""An imported model is trained on by the stages that train our own, and goes out with its template."""

from pathlib import Path

import peft
import pytest
import torch
import transformers

from ostinato.infra.platform.cluster.workspace import ProgressWriter, Workspace
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint import load_spec
from ostinato.models.training.config import LoraConfig, PhaseConfig
from ostinato.tasks.conversion.exporting import export_adapter, export_model
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.corpus.config import (
    CodeSource,
    CorpusConfig,
    CorpusRequest,
    DemonstrationConfig,
    TokenBudgets,
)
from ostinato.tasks.corpus.run import main as build_corpus
from ostinato.tasks.pretraining.config import (
    PretrainingConfig,
    PretrainingRequest,
    PretrainingResult,
)
from ostinato.tasks.pretraining.run import main as pretrain
from tests.fakes.published_model import TEMPLATE, write_published_model

FUNCTION = "def add_{0}(first, second):\n    total = first + second + {0}\n    return total\n\n\n"


def place(directory: Path) -> Workspace:
    directory.mkdir()
    return Workspace(directory, Settings(home=directory), ProgressWriter(directory))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_published_model(directory / "in")
    import_model(str(directory / "in"), directory / "base", directory)
    return directory / "base"


@pytest.fixture(scope="module")
def corpus(base: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    code, directory = tmp_path_factory.mktemp("code"), tmp_path_factory.mktemp("corpora")
    for number in range(40):
        text = "".join(FUNCTION.format(number * 50 + index) for index in range(8))
        (code / f"sums_{number}.py").write_text(text)
    config = CorpusConfig(
        sources=(CodeSource(kind="directory", name="code", path=str(code)),),
        budgets=TokenBudgets(code=6000, library=0, repair=0, repair_general=0),
        demonstrations=DemonstrationConfig(count=0),
        window_tokens=64,
        near_duplicate_ratio=1.0,
        held_out_share=0.2,
    )
    request = CorpusRequest(config=config, problems_directory="", tokenizer_path=str(base))
    return build_corpus(request, place(directory / "corpus")).directory


def train(directory: Path, base: Path, corpus: str, lora: LoraConfig | None) -> PretrainingResult:
    phase = PhaseConfig(
        name="code",
        blend={"code": (1.0, 1.0)},
        tokens=2560,
        sequence_tokens=64,
        microbatch_tokens=256,
        global_batch_tokens=256,
        muon_learning_rate=2e-3,
        adam_learning_rate=1e-3 if lora is None else 1e-2,
    )
    config = PretrainingConfig(phases=(phase,), codebase_sources=("code",), lora=lora)
    request = PretrainingRequest(
        config=config, corpus_directory=corpus, checkpoint_directory=str(base)
    )
    return pretrain(request, place(directory))


def test_imported_model_is_trained_on_and_exported(base: Path, corpus: str, tmp_path: Path) -> None:
    result = train(tmp_path / "run", base, corpus, None)
    assert result.after.perplexity < result.before.perplexity
    trained = Path(result.checkpoint_directory)
    assert load_spec(trained) == load_spec(base)
    export_model(trained, tmp_path / "out", name="x", lineage=[], dtype=None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE
    with pytest.raises(ConfigError, match="was trained without adapters"):
        export_adapter(trained, tmp_path / "adapter", name="x", lineage=[])


def test_adapter_beside_its_base_answers_as_the_merged_model(
    base: Path, corpus: str, tmp_path: Path
) -> None:
    """Read by the PEFT library, with transformers' model of the base beside it."""
    result = train(tmp_path / "run", base, corpus, LoraConfig(rank=4))
    assert result.after.perplexity < result.before.perplexity
    trained = Path(result.checkpoint_directory)
    export_model(base, tmp_path / "base", name="b", lineage=[], dtype=None)
    export_model(trained, tmp_path / "merged", name="m", lineage=[], dtype=None)
    export_adapter(trained, tmp_path / "adapter", name="m", lineage=["checkpoint/x@1"])
    drawn = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(3, load_spec(base).vocab_size, (2, 40), generator=drawn)
    read = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        start = read(tmp_path / "base")(tokens_BT).logits
        wanted = read(tmp_path / "merged")(tokens_BT).logits
        adapted = peft.PeftModel.from_pretrained(read(tmp_path / "base"), tmp_path / "adapter")
        found = adapted(tokens_BT).logits
    assert (wanted - start).abs().max() > 0.1
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)  # W x + B A x against (W + B A) x
    assert "checkpoint/x@1" in (tmp_path / "adapter" / "README.md").read_text()
