"""What helped an agent, looking back: judged chunks for a question, from finished trajectories.

`TraceRecord` (one solved attempt as lines of files it read, edited and was shown) and
`TraceExample` (a question with a helpfulness for every chunk of its repository). A chunk that was
edited in a solved attempt helped more than one that was only read, and that more than one that
search showed and nobody opened. It trains nothing.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ostinato.infra.agent.search.chunks import Chunk, cut_chunks
from ostinato.infra.platform.syntax import parse_python
from ostinato.models.code_words import CodeText
from ostinato.tasks.retrieval.config import TraceConfig
from ostinato.tasks.retrieval.measure import Pool

TRACES_FILE = "traces.jsonl"
LineRange = tuple[str, int, int]
"""Path, first line, last line; 1-based and inclusive, in the file as the agent found it."""


class TraceRecord(BaseModel):
    """One attempt, as far as search can learn from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    trajectory_id: str
    problem_id: str
    repository: str
    failing_tests: tuple[str, ...] = Field(description="what the user saw fail, by test id")
    report: str = Field(description="what the agent's first test run told it; empty: none")
    reads: tuple[LineRange, ...]
    edits: tuple[LineRange, ...]
    shown: tuple[LineRange, ...] = Field(description="hits of searches in the attempt")
    solved: bool


@dataclass(frozen=True, slots=True)
class TraceExample:
    """A question and how much each chunk of the repository helped to answer it."""

    problem_id: str
    repository: str
    query: str
    codes: Sequence[CodeText]
    helpfulness: tuple[float, ...]
    """Parallel to codes."""

    @property
    def answer(self) -> int:
        """Index of the chunk that helped most."""
        return int(np.argmax(self.helpfulness))

    def draw_candidates(self, count: int, random: np.random.Generator) -> list[int]:
        """Every chunk that has a judgement, then others at random up to `count`."""
        judged = [index for index, value in enumerate(self.helpfulness) if value != 0.0]
        others = [index for index, value in enumerate(self.helpfulness) if value == 0.0]
        most = max(0, min(count - len(judged), len(others)))
        return judged + [others[index] for index in random.permutation(len(others))[:most]]


@dataclass(frozen=True)
class ChunkedRepository:
    """Product code that can be searched, and tests that ask."""

    name: str
    chunks: tuple[Chunk, ...]
    tests: Mapping[str, str]
    """Test id -> source of the test function."""

    @classmethod
    def read(
        cls, name: str, files: Mapping[str, bytes], test_paths: Sequence[str]
    ) -> "ChunkedRepository":
        """Cuts the product files and finds the test functions."""
        chunks: list[Chunk] = []
        tests: dict[str, str] = {}
        for path in sorted(files):
            text = files[path].decode(errors="replace")
            if any(path == root or path.startswith(root + "/") for root in test_paths):
                tests.update(_test_sources(path, text))
            elif path.endswith(".py"):
                chunks += cut_chunks(path, text)
        return cls(name, tuple(chunks), tests)

    def describe_tests(self, test_ids: Iterable[str]) -> str:
        """Words of failing tests about the code they want. Ids without source speak by name."""
        said = []
        for test_id in test_ids:
            base = test_id.partition("[")[0]
            said.append(self.tests.get(base, base.rpartition("::")[2]))
        return "\n".join(said)


def read_traces(directory: Path) -> list[TraceRecord]:
    """The records of a traces artifact."""
    with (directory / TRACES_FILE).open(encoding="utf-8") as lines:
        return [TraceRecord.model_validate_json(line) for line in lines]


def make_examples(
    records: Iterable[TraceRecord],
    repositories: Mapping[str, ChunkedRepository],
    config: TraceConfig,
) -> list[TraceExample]:
    """One example a problem, judged by all its solved attempts together. Sorted by problem."""
    by_problem: dict[str, list[TraceRecord]] = {}
    for record in records:
        if record.solved and record.edits and record.repository in repositories:
            by_problem.setdefault(record.problem_id, []).append(record)
    codes = {
        name: tuple(chunk.code_text for chunk in repository.chunks)
        for name, repository in repositories.items()
    }
    examples = []
    for problem_id, attempts in sorted(by_problem.items()):
        repository = repositories[attempts[0].repository]
        judged = _judge(attempts, repository.chunks, config)
        query = repository.describe_tests(attempts[0].failing_tests)
        report = next((attempt.report for attempt in attempts if attempt.report), "")
        if any(value > 0 for value in judged):
            name = repository.name
            examples.append(
                TraceExample(problem_id, name, f"{query}\n{report}".strip(), codes[name], judged)
            )
    return examples


def _judge(
    attempts: Sequence[TraceRecord], chunks: Sequence[Chunk], config: TraceConfig
) -> tuple[float, ...]:
    judged = [0.0] * len(chunks)
    for attempt in attempts:
        for index, chunk in enumerate(chunks):
            if _touches(chunk, attempt.edits):
                value = config.edited
            elif _touches(chunk, attempt.reads):
                value = config.read
            elif _touches(chunk, attempt.shown):
                value = config.retrieved
            else:
                continue
            # the mean over attempts: a chunk that helped every time stands above one that did once
            judged[index] += value / len(attempts)
    return tuple(judged)


def _touches(chunk: Chunk, ranges: Iterable[LineRange]) -> bool:
    return any(
        path == chunk.path and first <= chunk.last_line and chunk.first_line <= last
        for path, first, last in ranges
    )


def _test_sources(path: str, text: str) -> dict[str, str]:
    try:
        tree = parse_python(text)
    except SyntaxError:
        return {}
    found: dict[str, str] = {}

    def visit(scope: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, ast.ClassDef):
                visit(node, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                source = ast.get_source_segment(text, node) or node.name
                found[f"{path}::{prefix}{node.name}"] = source

    visit(tree, "")
    return found


def pool_of_examples(examples: Sequence[TraceExample]) -> Pool:
    """Localisation as ranking: which chunk did the attempts that solved it edit?

    All examples are of one repository.
    """
    names = sorted({example.repository for example in examples})
    if len(names) != 1:
        raise ValueError(f"examples are of repositories {names}, wanted one")
    return Pool(
        names[0],
        tuple(examples[0].codes),
        tuple(example.query for example in examples),
        tuple(example.answer for example in examples),
    )
