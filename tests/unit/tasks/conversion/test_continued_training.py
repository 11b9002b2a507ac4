"""An imported model is trained on by the stages that train our own, and goes out with its template."""

from pathlib import Path

import transformers

from ostinato.infra.platform.cluster.workspace import ProgressWriter, Workspace
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint import load_spec
from ostinato.models.training.config import PhaseConfig
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.corpus.config import (
    CodeSource,
    CorpusConfig,
    CorpusRequest,
    DemonstrationConfig,
    TokenBudgets,
)
from ostinato.tasks.corpus.run import main as build_corpus
from ostinato.tasks.pretraining.config import PretrainingConfig, PretrainingRequest
from ostinato.tasks.pretraining.run import main as pretrain
from tests.fakes.published_model import TEMPLATE, write_published_model

FUNCTION = "def add_{0}(first, second):\n    total = first + second + {0}\n    return total\n\n\n"


def place(directory: Path) -> Workspace:
    directory.mkdir()
    return Workspace(directory, Settings(home=directory), ProgressWriter(directory))


def test_imported_model_is_trained_on_and_exported(tmp_path: Path) -> None:
    write_published_model(tmp_path / "in")
    base = tmp_path / "base"
    import_model(str(tmp_path / "in"), base, tmp_path)
    (tmp_path / "code").mkdir()
    for number in range(40):
        text = "".join(FUNCTION.format(number * 50 + index) for index in range(8))
        (tmp_path / "code" / f"sums_{number}.py").write_text(text)
    config = CorpusConfig(
        sources=(CodeSource(kind="directory", name="code", path=str(tmp_path / "code")),),
        budgets=TokenBudgets(code=6000, library=0, repair=0, repair_general=0),
        demonstrations=DemonstrationConfig(count=0),
        window_tokens=64,
        near_duplicate_ratio=1.0,
        held_out_share=0.2,
    )
    request = CorpusRequest(config=config, problems_directory="", tokenizer_path=str(base))
    corpus = build_corpus(request, place(tmp_path / "corpus"))
    phase = PhaseConfig(
        name="code",
        blend={"code": (1.0, 1.0)},
        tokens=2560,
        sequence_tokens=64,
        microbatch_tokens=256,
        global_batch_tokens=256,
        muon_learning_rate=2e-3,
        adam_learning_rate=1e-3,
    )
    result = pretrain(
        PretrainingRequest(
            config=PretrainingConfig(phases=(phase,), codebase_sources=("code",), world_size=1),
            corpus_directory=corpus.directory,
            checkpoint_directory=str(base),
        ),
        place(tmp_path / "pretraining"),
    )
    assert result.after.perplexity < result.before.perplexity
    trained = Path(result.checkpoint_directory)
    assert load_spec(trained) == load_spec(base)
    export_model(trained, tmp_path / "out", name="x", lineage=[], dtype=None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE
