"""Makes the documents of each kind until its token budget is spent.

Source files, functions and problems' reports in; lists of token documents for training and for held-out measurement out. Every
choice is drawn from the config's seed.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from models.rendering import Renderer
from tasks.corpus.config import CorpusConfig
from tasks.corpus.corruptions import Corruption, corrupt_function
from tasks.corpus.decontamination import Guard
from tasks.corpus.functions import CodeFunction, FunctionLimits, extract_functions
from tasks.corpus.reports import ReportBook
from tasks.corpus.sources import SourceFile
from tasks.corpus.transcripts import DocumentWriter, draw_plan

MAX_DRY_DRAWS = 200  # draws in a row that gave no document, after which a kind is used up
HELD_OUT_REPAIR_RATIO = 0.02


@dataclass(slots=True)
class Shard:
    """Documents of one kind, to train on and held out."""

    train: list[list[int]] = field(default_factory=list)
    held_out: list[list[int]] = field(default_factory=list)


def is_held_out(name: str, share: float) -> bool:
    """A stable draw by name."""
    return xxhash.xxh3_64_intdigest(name.encode()) % 10_000 < share * 10_000


def function_limits(config: CorpusConfig) -> FunctionLimits:
    """The limits of the config."""
    return FunctionLimits(config.max_function_lines, config.max_function_characters)


def make_code(
    files: Sequence[SourceFile], renderer: Renderer, config: CorpusConfig, guard: Guard
) -> Shard:
    """Windows of whole lines of general source files; held out by file."""
    shard = Shard()
    room = {False: config.budgets.code, True: int(config.budgets.code * config.held_out_share)}
    for file in _shuffled(files, config.seed, "code"):
        held_out = is_held_out(f"{file.source}/{file.path}", config.held_out_share)
        if room[held_out] <= 0:
            continue
        for window in _cut_windows(file.text, renderer, config.window_tokens):
            text = renderer.decode(window)
            if guard.forbids_text(text):
                continue
            (shard.held_out if held_out else shard.train).append([*window, renderer.end_of_text_id])
            room[held_out] -= len(window) + 1
            if room[held_out] <= 0:
                break
    return shard


def _cut_windows(text: str, renderer: Renderer, window_tokens: int) -> Iterator[list[int]]:
    window: list[int] = []
    for encoding in renderer.tokenizer.encode_batch(text.splitlines(keepends=True)):
        line: list[int] = encoding.ids
        if window and len(window) + len(line) > window_tokens - 1:
            yield window
            window = []
        window += line[: window_tokens - 1]
    if window:
        yield window


def make_library(
    functions: Sequence[CodeFunction], writer: DocumentWriter, config: CorpusConfig
) -> Shard:
    """The problem repositories' functions, clean or with one line to fill in."""
    shard = Shard()
    rng = random.Random(f"{config.seed}/library")
    room = config.budgets.library if functions else 0
    while room > 0:
        for function in rng.sample(functions, len(functions)):
            if rng.random() < config.fill_in_share:
                number = rng.randrange(len(function.lines)) + 1
                document = writer.write_fill_in(function, number)
            else:
                document = writer.write_clean(function)
            shard.train.append(document)
            room -= len(document)
            if room <= 0:
                break
    return shard


@dataclass(frozen=True, slots=True)
class RepairMaker:
    """Makes repair documents for one kind of functions."""

    name: str
    writer: DocumentWriter
    config: CorpusConfig
    guard: Guard
    reports: ReportBook

    def make(
        self,
        draw_function: Callable[[random.Random], CodeFunction | None],
        budget_tokens: int,
        *,
        keep: Callable[[CodeFunction, Corruption], bool] = lambda function, corruption: True,
    ) -> list[list[int]]:
        """Documents until the budget is spent or no further function is to be had."""
        rng = random.Random(f"{self.config.seed}/{self.name}")
        documents: list[list[int]] = []
        num_dry = 0
        while budget_tokens > 0 and num_dry < MAX_DRY_DRAWS:
            function = draw_function(rng)
            if function is None:
                break
            document = self._write(function, rng, keep)
            if document is None:
                num_dry += 1
                continue
            num_dry = 0
            documents.append(document)
            budget_tokens -= len(document)
        return documents

    def _write(
        self,
        function: CodeFunction,
        rng: random.Random,
        keep: Callable[[CodeFunction, Corruption], bool],
    ) -> list[int] | None:
        corruption = corrupt_function(function, rng)
        if corruption is None or not keep(function, corruption):
            return None
        if self.guard.forbids(function, corruption):
            return None
        plan = draw_plan(self.config.repair, rng)
        report = self.reports.invent(function, corruption, rng)
        return self.writer.write_repair(function, corruption, plan, report, rng)


def make_repairs(functions: Sequence[CodeFunction], maker: RepairMaker) -> Shard:
    """Self-made bugs in the problem repositories' functions.

    Functions come in proportion to their lines. Held out: a fixed draw of corruptions, never of lines.
    """
    allowed = [item for item in functions if not maker.guard.is_function_held_out(item)]
    if not allowed:
        return Shard()
    weights = [len(function.lines) for function in allowed]
    budget = maker.config.budgets.repair

    def draw(rng: random.Random) -> CodeFunction:
        return rng.choices(allowed, weights)[0]

    def held_out(function: CodeFunction, corruption: Corruption) -> bool:
        name = f"{function.path}/{function.symbol}/{corruption.number}/{corruption.broken}"
        return is_held_out(name, HELD_OUT_REPAIR_RATIO)

    train = maker.make(draw, budget, keep=lambda *item: not held_out(*item))
    rest = maker.make(draw, int(budget * HELD_OUT_REPAIR_RATIO / 2), keep=held_out)
    return Shard(train, rest)


def make_general_repairs(files: Sequence[SourceFile], maker: RepairMaker) -> Shard:
    """Self-made bugs in functions of general source files; held out by file."""
    config = maker.config
    budget = config.budgets.repair_general
    shards: list[list[list[int]]] = []
    for held_out, tokens in ((False, budget), (True, int(budget * config.held_out_share))):
        share = config.held_out_share
        chosen = [
            file for file in files if is_held_out(f"{file.source}/{file.path}", share) is held_out
        ]
        functions = _functions_of(_shuffled(chosen, config.seed, "general"), config)
        shards.append(maker.make(lambda rng, source=functions: next(source, None), tokens))
    return Shard(*shards)


def _functions_of(files: Sequence[SourceFile], config: CorpusConfig) -> Iterator[CodeFunction]:
    """Functions of the files, each text once, then the same again for as long as somebody asks."""
    limits = function_limits(config)
    functions: dict[tuple[str, ...], CodeFunction] = {}
    for file in files:
        for function in extract_functions(file.text, file.path, limits):
            if function.lines not in functions:
                functions[function.lines] = function
                yield function
    while functions:
        yield from functions.values()


def _shuffled(files: Sequence[SourceFile], seed: int, name: str) -> list[SourceFile]:
    return random.Random(f"{seed}/{name}").sample(files, len(files))
