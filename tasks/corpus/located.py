"""Documents that only locate a function: from its description to the call that reads it.

The steps are the demonstrator's own; only calls are trained on. Demonstrations have few functions,
which would be memorised; here are thousands, each time among other files.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.compact.places import tag_places
from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.agent.tools.limits import cut_middle
from ostinato.infra.agent.tools.searching import MAX_HITS, MAX_MATCHES, list_hits
from ostinato.models.rendering import Renderer
from ostinato.tasks.corpus.config import CorpusConfig, FunctionLimits
from ostinato.tasks.corpus.documents import is_held_out
from ostinato.tasks.corpus.repairs.locating import drive, locate
from ostinato.tasks.corpus.repairs.transcripts import Document, draw_plan, read_turns
from ostinato.tasks.corpus.source_code.functions import extract_functions
from ostinato.tasks.corpus.source_code.sources import SourceFile
from ostinato.tasks.problems.descriptions import describe_functions, write_prompt

POOL_FILES = 40
# the functions are only searched, not repaired, so they may be long
POOL_LIMITS = FunctionLimits(max_lines=60, max_characters=3000)


@dataclass(frozen=True, slots=True)
class DescribedFile:
    """Functions of one file without docstrings, and sentences that describe some of them."""

    source: str
    path: str
    text: str
    sentences: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FilePool:
    """Files of one source that are searched together."""

    name: str
    files: Sequence[DescribedFile]


@dataclass(frozen=True, slots=True)
class Locator:
    """Writer of documents in which the demonstrator locates a function."""

    config: CorpusConfig
    harness: HarnessConfig
    renderer: Renderer
    search: SearchService

    def write(
        self, file: DescribedFile, symbol: str, pool: FilePool, rng: random.Random
    ) -> Document | None:
        """The document of one function. None if the demonstrator does not find it."""
        sentence = file.sentences[symbol]
        texts = {item.path: item.text for item in pool.files}
        calls = locate(self.config.demonstrations.locating, sentence, file.path, symbol)
        located = drive(calls, lambda call: self._answer(call, pool.name, texts))
        if located is None:
            return None
        document = Document([], [])
        document.add(self.renderer.start(write_prompt(file.source, sentence)), False)
        for call, result in located.steps:
            document.add(self.renderer.encode_answer(call), True)
            document.add(self.renderer.append_results([result]), False)
        look = read_turns(draw_plan(self.config.demonstrations, rng), located.place)[0]
        document.add(self.renderer.encode_answer("".join(look)), True)
        return document

    def _answer(self, call: str, name: str, texts: Mapping[str, str]) -> str:
        query = call.partition(">")[2].rpartition("</")[0].strip()
        if call.startswith("<codebase_search>"):
            index = self.search.index_of(
                name, {path: text.encode() for path, text in texts.items()}
            )
            result = list_hits(index.search(query, MAX_HITS))
        else:
            result = grep_files(texts, query)
        if self.harness.place_tags:
            result, _ = tag_places(result)
        return cut_middle(result, self.harness.result_limit_characters)


def grep_files(files: Mapping[str, str], pattern: str) -> str:
    """Result of the grep tool on these files."""
    wanted, anywhere = re.compile(pattern), re.compile(pattern, re.MULTILINE)
    lines = [
        f"{path}:{number}:{line}"
        for path in sorted(files)
        if anywhere.search(files[path])  # one fast search, since most files have no match
        for number, line in enumerate(files[path].split("\n"), start=1)
        if wanted.search(line)
    ]
    note = [f"{len(lines) - MAX_MATCHES} more matches"] if len(lines) > MAX_MATCHES else []
    return "\n".join([*sorted(lines[:MAX_MATCHES]), *note]) or "no matches"


def make_located(files: Sequence[SourceFile], locator: Locator) -> list[Document]:
    """Documents until the budget is spent: every function once, then again in other pools."""
    config = locator.config
    if not config.budgets.located:
        return []
    described = [
        _describe(file)
        for file in files
        if not is_held_out(f"{file.source}/{file.path}", config.held_out_share)
    ]
    rng = random.Random(f"{config.seed}/located")
    documents: list[Document] = []
    left = config.budgets.located
    for number in count():
        num_before = len(documents)
        for pool in draw_pools(described, number, rng):
            described_here = [(file, symbol) for file in pool.files for symbol in file.sentences]
            for file, symbol in rng.sample(described_here, len(described_here)):
                if left <= 0:
                    return documents
                document = locator.write(file, symbol, pool, rng)
                if document is not None:
                    documents.append(document)
                    left -= len(document.token_ids)
        if len(documents) == num_before:
            break
    return documents


def draw_pools(files: Sequence[DescribedFile], number: int, rng: random.Random) -> list[FilePool]:
    """All files once, in pools of POOL_FILES files of one source, shuffled."""
    pools: list[FilePool] = []
    for source in sorted({file.source for file in files}):
        mine = [file for file in files if file.source == source]
        mine = rng.sample(mine, len(mine))
        pools += [
            FilePool(f"{source}/{number}/{start}", mine[start : start + POOL_FILES])
            for start in range(0, len(mine), POOL_FILES)
        ]
    rng.shuffle(pools)
    return pools


def _describe(file: SourceFile) -> DescribedFile:
    functions = list(extract_functions(file.text, file.path, POOL_LIMITS))
    known = {function.symbol for function in functions}
    sentences = {
        name: text for name, text in describe_functions(file.text).items() if name in known
    }
    text = "\n\n\n".join("\n".join(function.lines) for function in functions)
    return DescribedFile(file.source, file.path, text, sentences)
