"""Repair documents of general functions that are described and located first.

General source files in; documents out whose locating step is the demonstrator's own
(tasks/corpus/locating.py), answered by the same search service, or as grep would answer, over a
pool of neighbouring files. Demonstrations know few functions and would teach them by heart; these
teach to read results. Reports are invented, as in other repair documents.
"""

import ast
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infra.harness.other_tools import MAX_HITS, MAX_MATCHES, list_hits
from infra.harness.report import cut_middle
from infra.search.service import SearchService
from infra.syntax import parse_python
from tasks.corpus.documents import RepairMaker, function_limits, is_held_out
from tasks.corpus.functions import CodeFunction, extract_functions
from tasks.corpus.locating import drive, locate
from tasks.corpus.sources import SourceFile
from tasks.corpus.transcripts import Located
from tasks.descriptions import first_sentence, is_usable, write_prompt

POOL_FILES = 40


@dataclass(frozen=True, slots=True)
class Pool:
    """Neighbouring files of one source, searched together."""

    name: str
    source: str
    files: Mapping[str, str]
    described: Mapping[CodeFunction, str]


@dataclass(slots=True)
class Locator:
    """Finds described functions in their pools as the demonstrator does."""

    maker: RepairMaker
    search: SearchService
    result_limit_characters: int
    known: dict[CodeFunction, Located | None] = field(default_factory=dict)

    def find(self, function: CodeFunction, pool: Pool) -> Located | None:
        """Prompt and steps; None when the demonstrator does not find it. Asked once a function."""
        if function not in self.known:
            way = self.maker.config.demonstrations.locating
            description = pool.described[function]
            talk = locate(way, description, function.path, function.symbol)
            steps = drive(talk, lambda call: self._answer(call, pool))
            prompt = write_prompt(pool.source, description)
            self.known[function] = None if steps is None else Located(prompt, steps)
        return self.known[function]

    def _answer(self, call: str, pool: Pool) -> str:
        query = call.partition(">")[2].rpartition("</")[0]
        if call.startswith("<codebase_search>"):
            files = {path: text.encode() for path, text in pool.files.items()}
            self.search.add_repository(pool.name, files)
            result = list_hits(self.search.search(pool.name, pool.name, {}, query, MAX_HITS))
        else:
            result = grep_files(pool.files, query)
        return cut_middle(result, self.result_limit_characters)


def grep_files(files: Mapping[str, str], pattern: str) -> str:
    """What the grep tool says of these files."""
    wanted = re.compile(pattern)
    lines = [
        f"{path}:{number}:{line}"
        for path in sorted(files)
        for number, line in enumerate(files[path].split("\n"), start=1)
        if wanted.search(line)
    ]
    note = [f"{len(lines) - MAX_MATCHES} more matches"] if len(lines) > MAX_MATCHES else []
    return "\n".join([*sorted(lines[:MAX_MATCHES]), *note]) or "no matches"


def make_located_repairs(files: Sequence[SourceFile], locator: Locator) -> list[list[int]]:
    """Documents until the budget is spent, each of a function drawn from all that are found."""
    maker = locator.maker
    config = maker.config
    room = config.budgets.located
    share = config.held_out_share
    trained = [item for item in files if not is_held_out(f"{item.source}/{item.path}", share)]
    pools = {function: pool for pool in make_pools(trained, maker) for function in pool.described}
    functions = list(pools)
    rng = random.Random(f"{config.seed}/located")
    documents: list[list[int]] = []

    def draw(rng: random.Random) -> CodeFunction | None:
        return rng.choice(functions) if functions else None

    while room > 0:
        bug = maker.draw_bug(draw, rng, lambda bug: locator.find(bug[0], pools[bug[0]]) is not None)
        if bug is None:
            break
        report = maker.reports.invent(*bug, rng)
        located = locator.find(bug[0], pools[bug[0]])
        documents.append(maker.write(bug, report, rng, located))
        room -= len(documents[-1])
    return documents


def make_pools(files: Sequence[SourceFile], maker: RepairMaker) -> list[Pool]:
    """Files of a source in the order of their paths, POOL_FILES to a pool."""
    limits = function_limits(maker.config)
    pools: list[Pool] = []
    for source in sorted({file.source for file in files}):
        mine = sorted((file for file in files if file.source == source), key=lambda file: file.path)
        for start in range(0, len(mine), POOL_FILES):
            texts: dict[str, str] = {}
            described: dict[CodeFunction, str] = {}
            for file in mine[start : start + POOL_FILES]:
                functions = list(extract_functions(file.text, file.path, limits))
                texts[file.path] = "\n\n\n".join("\n".join(item.lines) for item in functions)
                sentences = _sentences(file.text)
                described |= {
                    item: sentences[item.symbol] for item in functions if item.symbol in sentences
                }
            pools.append(Pool(f"{source}/{start}", source, texts, described))
    return pools


def _sentences(text: str) -> dict[str, str]:
    """What the top-level functions of a file are for, where that is said; a name that is defined
    twice is left out.
    """
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError):
        return {}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = [node.name for node in functions]
    found = {node.name: first_sentence(ast.get_docstring(node) or "") for node in functions}
    return {
        name: sentence
        for name, sentence in found.items()
        if is_usable(sentence, name) and names.count(name) == 1
    }
