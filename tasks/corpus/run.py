"""Child entry of the corpus stage: sources and problems in, token shards and demonstrations out."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from safetensors.numpy import save_file

from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.platform.cluster.workspace import Workspace, replace_text
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.models.rendering import Renderer, load_renderer, train_tokenizer
from ostinato.tasks.corpus.chat_rows import read_conversations
from ostinato.tasks.corpus.config import CONVERSATIONS, CorpusRequest, CorpusResult, ShardStatistics
from ostinato.tasks.corpus.conversations import make_documents
from ostinato.tasks.corpus.decontamination import Guard
from ostinato.tasks.corpus.documents import (
    RepairMaker,
    Shard,
    make_code,
    make_general_repairs,
    make_library,
    make_repairs,
)
from ostinato.tasks.corpus.located import Locator, make_located
from ostinato.tasks.corpus.overlap import measure_overlap
from ostinato.tasks.corpus.repairs.demonstrations import (
    Demonstrations,
    DemonstrationSettings,
    make_demonstrations,
)
from ostinato.tasks.corpus.repairs.transcripts import Document, DocumentWriter
from ostinato.tasks.corpus.source_code.deduplication import Deduplicator, Novelty
from ostinato.tasks.corpus.source_code.functions import (
    CodeFunction,
    ProblemSource,
    extract_functions,
    read_problem_source,
)
from ostinato.tasks.corpus.source_code.sources import (
    SourceFile,
    describe_pins,
    pin_sources,
    read_source,
)

SHARDS_DIRECTORY = "shards"
STATISTICS_FILE = "statistics.json"
TOKENIZER_CHARACTERS = 800_000
# copies of the problem functions in the tokenizer's text, since they are few and matter most
LIBRARY_REPEATS = 8


@dataclass(slots=True)
class _Notes:
    """Counts for the statistics."""

    sources: tuple[str, ...] = ()
    files_read: int = 0
    files_dropped: Counter[str] = field(default_factory=Counter)
    licences: Counter[str] = field(default_factory=Counter)


def main(request: CorpusRequest, workspace: Workspace) -> CorpusResult:
    """Builds the corpus that the request describes."""
    config, notes, progress = request.config, _Notes(), workspace.progress
    source = (
        read_problem_source(Path(request.problems_directory))
        if request.problems_directory
        else ProblemSource()
    )
    guard = Guard(source.problems)
    progress.update(0, 5, "reading sources")
    files = _read_files(request, source, notes, workspace.settings)
    functions = source.functions(request.limits)
    others = source.other_functions(request.limits)
    progress.update(1, 5, "tokenizer")
    renderer = _make_renderer(request, guard.allowed(functions), files)
    renderer.save(workspace.directory)
    search = SearchService.load(request.search_directory)
    demonstrations = _demonstrate(request, source, renderer, guard, workspace, search)
    progress.update(3, 5, "documents that locate")
    located = make_located(files, Locator(config, request.harness, renderer, search))
    conversations, held_out = _read_conversations(request, renderer)
    learned = [*demonstrations.documents, *located, *conversations]
    write_demonstrations(workspace.directory, learned)
    writer = DocumentWriter(renderer, source.prompt_templates())

    def maker(name: str) -> RepairMaker:
        return RepairMaker(name, writer, config, guard, demonstrations.reports)

    progress.update(3.5, 5, "documents")
    shards = {
        "code": make_code(files, renderer, config, guard),
        "library": make_library(guard.allowed(functions), others, writer, config),
        "repair": make_repairs(functions, maker("repair")),
        "repair_general": make_general_repairs(files, maker("repair_general"), request.limits),
        CONVERSATIONS: Shard(held_out=[item.token_ids for item in held_out]),
    }
    progress.update(4, 5, "shards")
    trained = {
        "pretraining": [document for shard in shards.values() for document in shard.train],
        "fine-tuning": [document.token_ids for document in learned],
    }
    statistics = tuple(_write_shards(workspace.directory / SHARDS_DIRECTORY, shards))
    result = CorpusResult(
        directory=str(workspace.directory),
        vocab_size=renderer.vocab_size,
        shards=statistics,
        demonstrations=len(demonstrations.documents),
        demonstration_tokens=sum(len(item.token_ids) for item in demonstrations.documents),
        demonstrations_by_plan=dict(sorted(demonstrations.by_plan.items())),
        sources=notes.sources,
        files_read=notes.files_read,
        files_dropped=dict(notes.files_dropped),
        documents_decontaminated=guard.num_dropped,
        licences=dict(sorted(notes.licences.items())),
        overlap=measure_overlap(source, trained, renderer),
    )
    replace_text(workspace.directory / STATISTICS_FILE, result.model_dump_json(indent=1))
    progress.update(5, 5, "corpus is complete")
    return result


def _read_files(
    request: CorpusRequest, source: ProblemSource, notes: _Notes, settings: Settings
) -> list[SourceFile]:
    """General files that are copies neither of one another nor of problem repositories' files."""
    config = request.config
    pins = request.pins or pin_sources(config.sources, settings)
    notes.sources = describe_pins(config.sources, pins)
    deduplicator = Deduplicator(config.near_duplicate_ratio)
    for name in sorted({problem.repository for problem in source.problems}):
        for path, content in sorted(source.repository(name).files.items()):
            if path.endswith(".py"):
                deduplicator.judge(content.decode(errors="replace"))
    kept: list[SourceFile] = []
    for code_source, pin in zip(config.sources, pins, strict=True):
        for file in read_source(code_source, pin, settings, notes.files_dropped):
            notes.files_read += 1
            novelty = deduplicator.judge(file.text)
            if novelty is not Novelty.NEW:
                notes.files_dropped[novelty.value] += 1
                continue
            notes.licences[file.licence] += len(file.text)
            kept.append(file)
    return kept


def _make_renderer(
    request: CorpusRequest, functions: Sequence[CodeFunction], files: Sequence[SourceFile]
) -> Renderer:
    if request.tokenizer_path is not None:
        return load_renderer(Path(request.tokenizer_path))
    texts = ["\n".join(function.lines) for function in functions] * LIBRARY_REPEATS
    left_characters = TOKENIZER_CHARACTERS
    for file in files[:: max(len(files) // 200, 1)]:
        for function in extract_functions(file.text, file.path, request.limits):
            texts.append("\n".join(function.lines))
            left_characters -= len(texts[-1])
        if left_characters <= 0:
            break
    return Renderer(train_tokenizer(texts, request.config.vocab_size))


def _demonstrate(
    request: CorpusRequest,
    source: ProblemSource,
    renderer: Renderer,
    guard: Guard,
    workspace: Workspace,
    search: SearchService,
) -> Demonstrations:
    config = request.config
    splits = config.demonstrations.splits
    problems = [item for item in source.problems if item.split in splits and item.reply is None]
    settings = DemonstrationSettings(
        config.demonstrations, request.harness, renderer, guard, config.seed, search
    )

    def report(done: int, total: int) -> None:
        workspace.progress.update(2 + done / total, 5, f"demonstration {done} of {total}")

    return asyncio.run(make_demonstrations(problems, source.repositories or {}, settings, report))


def _read_conversations(
    request: CorpusRequest, renderer: Renderer
) -> tuple[Sequence[Document], Sequence[Document]]:
    """A user's own conversations, for training and held out. `held_out_share` of them, at least one, are drawn at
    random and held out.
    """
    config = request.config
    if not config.conversations:
        return (), ()
    conversations = read_conversations(Path(config.conversations))
    if len(conversations) < 2:
        raise ConfigError(
            f"{config.conversations} holds {len(conversations)} conversation, wanted at least 2: one is "
            "held out to measure perplexity"
        )
    order = random.Random(config.seed).sample(conversations, len(conversations))
    documents = make_documents(order, renderer, request.harness)
    count = max(1, round(len(documents) * config.held_out_share))
    return documents[count:], documents[:count]


def _write_shards(directory: Path, shards: dict[str, Shard]) -> Iterator[ShardStatistics]:
    for name, shard in shards.items():
        for part, documents in (("train", shard.train), ("heldout", shard.held_out)):
            if documents:
                yield write_shard(directory, f"{name}_{part}", documents)


DEMONSTRATIONS_FILE = "demonstrations.safetensors"


def write_shard(directory: Path, name: str, documents: Iterable[Sequence[int]]) -> ShardStatistics:
    """Writes documents of int32 tokens as NAME.bin and NAME.idx."""
    directory.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(directory / f"{name}.bin"), dtype=np.int32)
    num_documents = num_tokens = 0
    for token_ids in documents:
        builder.add_document(torch.tensor(token_ids, dtype=torch.int32), [len(token_ids)])
        num_documents += 1
        num_tokens += len(token_ids)
    builder.finalize(str(directory / f"{name}.idx"))
    return ShardStatistics(name=name, documents=num_documents, tokens=num_tokens)


def write_demonstrations(directory: Path, documents: Sequence[Document]) -> None:
    """Writes all demonstrations end to end: `offsets[i]:offsets[i + 1]` is document i."""
    lengths = [len(document.token_ids) for document in documents]
    token_ids = [token for document in documents for token in document.token_ids]
    loss_mask = [value for document in documents for value in document.loss_mask]
    arrays = {
        "token_ids": np.asarray(token_ids, dtype=np.int32),
        "loss_mask": np.asarray(loss_mask, dtype=np.uint8),
        "offsets": np.asarray([0, *np.cumsum(lengths)], dtype=np.int64),
    }
    temporary = directory / f".{DEMONSTRATIONS_FILE}"
    save_file(arrays, temporary)
    temporary.replace(directory / DEMONSTRATIONS_FILE)
