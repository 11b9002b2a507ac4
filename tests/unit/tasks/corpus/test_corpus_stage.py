"""The whole stage on a tiny repository, with real sandboxes and real tests."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from safetensors.numpy import load_file

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.settings import Settings
from ostinato.models.rendering import Renderer
from ostinato.tasks.corpus import run
from ostinato.tasks.corpus.config import (
    CodeSource,
    CorpusConfig,
    CorpusRequest,
    CorpusResult,
    DemonstrationConfig,
    TokenBudgets,
)
from ostinato.tasks.corpus.located import make_located
from ostinato.tasks.corpus.overlap import measure_overlap
from ostinato.tasks.records import Split
from tests.unit.tasks.corpus.conftest import BUGS, write_problems

GENERAL = '''import os


def find_files(root, suffix):
    """All files below root."""
    found = []
    for folder, _, names in os.walk(root):
        found.extend(os.path.join(folder, name) for name in names if name.endswith(suffix))
    return sorted(found)


def read_number_{number}(path, fallback={number}):
    with open(path) as file:
        text = file.read()
    return int(text) if text.isdigit() else fallback + {number}
'''
DESCRIBED = '''def open_box_{number}(path):
    """Open whatever box {number} stands at a path."""
    with open(path) as file:
        text = file.read()
    return text
'''


def config_over(
    code: Path, modules: Sequence[str], budgets: TokenBudgets, demonstrations: DemonstrationConfig
) -> CorpusConfig:
    """A corpus of these modules, which are written to `code`."""
    code.mkdir()
    for number, text in enumerate(modules):
        (code / f"module_{number}.py").write_text(text)
    return CorpusConfig(
        sources=(CodeSource(kind="directory", name="code", path=str(code), licence="MIT"),),
        vocab_size=500,
        budgets=budgets,
        held_out_share=0.2,
        near_duplicate_ratio=1.0,
        demonstrations=demonstrations,
    )


def request_below(folder: Path, problems_directory: Path) -> CorpusRequest:
    config = config_over(
        folder / "code",
        [GENERAL.replace("{number}", str(number)) * 2 for number in range(40)],
        TokenBudgets(code=4000, library=4000, repair=8000, repair_general=4000),
        DemonstrationConfig(
            count=12, wrong_first_share=0.4, give_up_share=0.2, boxes_per_repository=2
        ),
    )
    return CorpusRequest(config=config, problems_directory=str(problems_directory))


@pytest.fixture
def request_for_corpus(problems_directory: Path, tmp_path: Path) -> CorpusRequest:
    return request_below(tmp_path, problems_directory)


def build(request: CorpusRequest, directory: Path) -> tuple[CorpusResult, Renderer]:
    directory.mkdir()
    settings = Settings(home=directory / "home")
    result = run.main(request, Workspace.open(directory, settings))
    return result, Renderer.load(directory)


class Built(NamedTuple):
    request: CorpusRequest
    directory: Path
    result: CorpusResult
    renderer: Renderer


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """What tests read that change nothing of the request."""
    folder = tmp_path_factory.mktemp("corpus")
    request = request_below(folder, write_problems(folder / "problems"))
    return Built(request, folder / "out", *build(request, folder / "out"))


def read_shard(directory: Path, name: str, renderer: Renderer) -> list[str]:
    shard = IndexedDataset(str(directory / "shards" / name))
    return [renderer.decode(shard[index].tolist()) for index in range(len(shard))]


def read_demonstrations(directory: Path, renderer: Renderer) -> list[tuple[str, str]]:
    """Text of each demonstration, whole and trained."""
    arrays = load_file(directory / "demonstrations.safetensors")
    texts = []
    for start, end in zip(arrays["offsets"], arrays["offsets"][1:], strict=False):
        ids = arrays["token_ids"][start:end]
        trained = ids[arrays["loss_mask"][start:end].astype(bool)]
        texts.append((renderer.decode(ids.tolist()), renderer.decode(trained.tolist())))
    return texts


def test_the_stage_builds_a_clean_corpus(built: Built) -> None:
    _, out, result, renderer = built
    names = {shard.name for shard in result.shards}
    assert names >= {
        "code_train",
        "code_heldout",
        "library_train",
        "library_heldout",
        "repair_train",
        "repair_general_train",
    }
    assert json.loads((out / "statistics.json").read_text())["demonstrations"] > 0
    for shard in result.shards:
        documents = read_shard(out, shard.name, renderer)
        assert all(document.endswith("<|endoftext|>") for document in documents)
        for symbol, _, broken, split in BUGS:
            if split.value != "demonstration":
                line = re.compile(re.escape(broken) + r"(\n|<)")
                assert not any(line.search(text) and symbol in text for text in documents), broken
    repairs = "".join(read_shard(out, "repair_train", renderer))
    assert "largest_gap" not in repairs
    assert "failed: TypeError: " in repairs  # said by real tests
    library = "".join(read_shard(out, "library_train", renderer))
    assert "keep_even" in library
    assert "largest_gap" not in library

    assert "shout" in read_shard(out, "library_heldout", renderer)[0]
    assert "shout" not in "".join(read_shard(out, "library_train", renderer))

    demonstrations = read_demonstrations(out, renderer)
    assert len(demonstrations) == result.demonstrations >= 8
    assert any("Could not fix it." in text for text, _ in demonstrations)
    for text, trained in demonstrations:
        assert "<|tool|>" not in trained
        assert "<|user|>" not in trained
        assert text.startswith("<|user|>Fix ")
        assert text.endswith("<|end|>")
        edits = re.findall(r"<edit_file>(.*?)</edit_file>", text)
        shown = re.findall(r"<edit_file>(.*?)</edit_file>", trained)
        if len(edits) == 2:
            assert shown == ["", edits[1]]
        if text.endswith("Fixed.<|end|>"):
            assert "passed<|end|><|assistant|>Fixed." in text
            assert "failed: " in text


def test_the_answers_of_functions_held_out_whole_stand_in_no_document(built: Built) -> None:
    found = {overlap.split: overlap for overlap in built.result.overlap}
    whole, lines = found[Split.HELD_OUT_FUNCTION], found[Split.HELD_OUT]
    assert (whole.problems, whole.problems_with_answer, whole.median_documents) == (1, 0, 0)
    # the function is not held out, so its right line is trained on, and the card says so
    assert (lines.problems, lines.problems_with_answer) == (1, 1)
    assert lines.median_documents > 1
    stages = ["pretraining", "fine-tuning", "RL", "cycle"]
    assert [ngrams.stage for ngrams in whole.ngrams] == stages
    assert [ngrams.problems_with_text for ngrams in whole.ngrams] == [0, 0, 0, 0]
    by_stage = {ngrams.stage: ngrams for ngrams in lines.ngrams}
    assert by_stage["pretraining"].problems_with_answer == 1
    assert by_stage["pretraining"].median_share > 0.9
    assert by_stage["cycle"].problems_with_text == 0  # no user has this problem


def test_every_document_written_for_training_is_compared_with_the_answers(
    request_for_corpus: CorpusRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "messages": [
            {"role": "user", "content": "What does largest_gap return?"},
            {"role": "assistant", "content": "This:\n    return max(gaps, default=0)\n"},
        ]
    }
    path = tmp_path / "told.jsonl"
    path.write_text(f"{json.dumps(told)}\n" * 5)
    for number in range(6):
        text = (DESCRIBED + GENERAL).replace("{number}", str(number))
        (tmp_path / "code" / f"described_{number}.py").write_text(text)
    config = request_for_corpus.config
    budgets = config.budgets.model_copy(update={"located": 2000})
    config = config.model_copy(update={"conversations": str(path), "budgets": budgets})
    compared: list[tuple[int, ...]] = []

    def measure(source, documents, renderer):
        compared.extend(tuple(document) for some in documents.values() for document in some)
        return measure_overlap(source, documents, renderer)

    monkeypatch.setattr(run, "measure_overlap", measure)
    located = []
    monkeypatch.setattr(
        run, "make_located", lambda *given: located.extend(make_located(*given)) or located
    )
    out = tmp_path / "out"
    result, _ = build(request_for_corpus.model_copy(update={"config": config}), out)
    assert located
    arrays = load_file(out / "demonstrations.safetensors")
    written = [
        tuple(arrays["token_ids"][start:end].tolist())
        for start, end in pairwise(arrays["offsets"].tolist())
    ]
    assert len(written) == result.demonstrations + len(located) + 4
    for shard in result.shards:
        if shard.name.endswith("_train"):
            dataset = IndexedDataset(str(out / "shards" / shard.name))
            written += [tuple(dataset[index].tolist()) for index in range(len(dataset))]
    assert Counter(compared) == Counter(written)
    whole = next(item for item in result.overlap if item.split is Split.HELD_OUT_FUNCTION)
    # four conversations tell the answer, the fifth is held out
    assert (whole.problems, whole.problems_with_answer, whole.median_documents) == (1, 1, 4)


def test_the_same_request_gives_the_same_corpus(built: Built, tmp_path: Path) -> None:
    again = tmp_path / "again"
    build(built.request, again)
    for file in sorted((built.directory / "shards").iterdir()):
        assert file.read_bytes() == (again / "shards" / file.name).read_bytes()
    first, second = (
        load_file(directory / "demonstrations.safetensors")
        for directory in (built.directory, again)
    )
    assert all(np.array_equal(first[name], second[name]) for name in first)
