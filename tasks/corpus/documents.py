"""Documents of each kind until its token budget is spent, drawn from the config's seed."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from ostinato.models.rendering import Renderer
from ostinato.tasks.corpus.config import CorpusConfig, FunctionLimits
from ostinato.tasks.corpus.decontamination import Guard
from ostinato.tasks.corpus.repairs.transcripts import DocumentWriter, FailureReports
from ostinato.tasks.corpus.source_code.functions import CodeFunction, extract_functions
from ostinato.tasks.corpus.source_code.sources import SourceFile
from ostinato.tasks.problems.breaking.drawn_mutations import draw_mutation
from ostinato.tasks.problems.breaking.mutations import Mutation

MAX_DRY_DRAWS = 10_000  # draws in a row without a document, after which a kind is used up
HELD_OUT_REPAIR_RATIO = 0.02


@dataclass(slots=True)
class Shard:
    """Documents of one kind, for training and held out."""

    train: list[list[int]] = field(default_factory=list)
    held_out: list[list[int]] = field(default_factory=list)


def is_held_out(name: str, share: float) -> bool:
    """A stable draw by name."""
    return xxhash.xxh3_64_intdigest(name.encode()) % 10_000 < share * 10_000


def make_code(
    files: Sequence[SourceFile], renderer: Renderer, config: CorpusConfig, guard: Guard
) -> Shard:
    """Windows of whole lines of general source files. Held out by file."""
    shard = Shard()
    left = {False: config.budgets.code, True: int(config.budgets.code * config.held_out_share)}
    for file in _shuffled(files, config.seed, "code"):
        held_out = is_held_out(f"{file.source}/{file.path}", config.held_out_share)
        if left[held_out] <= 0:
            continue
        for window in _cut_windows(file.text, renderer, config.window_tokens):
            text = renderer.decode(window)
            if guard.forbids_text(text):
                continue
            (shard.held_out if held_out else shard.train).append([*window, renderer.end_of_text_id])
            left[held_out] -= len(window) + 1
            if left[held_out] <= 0:
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
    functions: Sequence[CodeFunction],
    others: Sequence[CodeFunction],
    writer: DocumentWriter,
    config: CorpusConfig,
) -> Shard:
    """The problem repositories' functions, clean or with one line to fill in.

    Held out are `others`, functions of files without problems, all clean.
    """
    shard = Shard()
    left = int(config.budgets.library * config.held_out_share)
    for function in random.Random(f"{config.seed}/others").sample(others, len(others)):
        if left <= 0:
            break
        shard.held_out.append(writer.write_clean(function))
        left -= len(shard.held_out[-1])
    rng = random.Random(f"{config.seed}/library")
    left = config.budgets.library if functions else 0
    while left > 0:
        for function in rng.sample(functions, len(functions)):
            if rng.random() < config.fill_in_share:
                number = rng.randrange(len(function.lines)) + 1
                document = writer.write_fill_in(function, number)
            else:
                document = writer.write_clean(function)
            shard.train.append(document)
            left -= len(document)
            if left <= 0:
                break
    return shard


Bug = tuple[CodeFunction, Mutation]
DrawFunction = Callable[[random.Random], CodeFunction | None]


@dataclass(frozen=True, slots=True)
class RepairMaker:
    """Makes repair documents for one kind of functions."""

    name: str
    writer: DocumentWriter
    config: CorpusConfig
    guard: Guard
    reports: FailureReports

    def make(
        self,
        draw_function: DrawFunction,
        budget_tokens: int,
        keep: Callable[[Bug], bool] = lambda bug: True,
    ) -> list[list[int]]:
        """Documents with invented reports until the budget or the supply is spent."""
        rng = random.Random(f"{self.config.seed}/{self.name}")
        documents: list[list[int]] = []
        while budget_tokens > 0:
            bug = self._draw_bug(draw_function, rng, keep)
            if bug is None:
                break
            report = self.reports.invent(*bug, rng)
            is_parallel = rng.random() < self.config.repair_parallel_share
            document = self.writer.write_repair(
                *bug, is_parallel=is_parallel, report=report, rng=rng
            )
            documents.append(document)
            budget_tokens -= len(documents[-1])
        return documents

    def _draw_bug(
        self, draw_function: DrawFunction, rng: random.Random, keep: Callable[[Bug], bool]
    ) -> Bug | None:
        """A mutation that is allowed and wanted. None if there seem to be no more."""
        for _ in range(MAX_DRY_DRAWS):
            function = draw_function(rng)
            if function is None:
                return None
            mutation = draw_mutation(function.lines, rng)
            if mutation is None or not keep((function, mutation)):
                continue
            if not self.guard.forbids(function, mutation):
                return function, mutation
        return None


def draw_from(functions: Sequence[CodeFunction]) -> DrawFunction:
    """Draws functions in proportion to their lines."""
    weights = [len(item.lines) for item in functions]
    return lambda rng: rng.choices(functions, weights)[0] if functions else None


def is_repair_held_out(bug: Bug) -> bool:
    """Whether a mutation belongs to a fixed sample (of mutations, not of lines) kept for measuring."""
    function, mutation = bug
    name = f"{function.path}/{function.symbol}/{mutation.line_number}/{mutation.broken_text}"
    return is_held_out(name, HELD_OUT_REPAIR_RATIO)


def make_repairs(functions: Sequence[CodeFunction], maker: RepairMaker) -> Shard:
    """Self-made bugs in problem repositories' functions."""
    draw = draw_from(maker.guard.allowed(functions))
    budget = maker.config.budgets.repair
    train = maker.make(draw, budget, lambda bug: not is_repair_held_out(bug))
    held_out = maker.make(draw, int(budget * HELD_OUT_REPAIR_RATIO / 2), is_repair_held_out)
    return Shard(train, held_out)


def make_general_repairs(
    files: Sequence[SourceFile], maker: RepairMaker, limits: FunctionLimits
) -> Shard:
    """Self-made bugs in functions of general source files. Held out by file."""
    config = maker.config
    budget = config.budgets.repair_general
    shards: list[list[list[int]]] = []
    for held_out, tokens in ((False, budget), (True, int(budget * config.held_out_share))):
        share = config.held_out_share
        chosen = [
            file for file in files if is_held_out(f"{file.source}/{file.path}", share) is held_out
        ]
        functions = _functions_of(_shuffled(chosen, config.seed, "general"), limits)
        shards.append(maker.make(lambda rng, source=functions: next(source, None), tokens))
    return Shard(*shards)


def _functions_of(files: Sequence[SourceFile], limits: FunctionLimits) -> Iterator[CodeFunction]:
    """Yields the functions of the files, each text once, then the same functions again without end."""
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
