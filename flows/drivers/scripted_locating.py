"""Child entry: where the demonstrator's own locating leads on held-out problems, in one arm.

Joins two stages that do not know one another: the script of tasks/corpus/locating.py is asked, an
evaluation's rows of attempts that were told the function are given its outcome. Enters: problems,
those rows, the way to locate. Leaves: rows as if each attempt had located its function first: not
solved where the script does not find it, with the script's calls and tokens as the cost. The same
attempts serve both arms, so a difference between arms is one of locating alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from flows.drivers.problem_set import load_problems, load_repositories
from infra.cluster.workspace import Workspace
from infra.harness.other_tools import MAX_HITS, list_hits
from infra.harness.report import cut_middle
from infra.sandbox.repository import PreparedRepository
from infra.search.service import SearchService
from models.rendering import Renderer
from tasks.corpus.located_repairs import grep_files
from tasks.corpus.locating import Locating, drive, locate
from tasks.descriptions import read_description
from tasks.evaluation.locating import LocatingRow
from tasks.records import Problem

TEXT_SUFFIXES = (".py", ".md", ".rst", ".toml", ".txt", ".cfg")


class ScriptedLocatingRequest(BaseModel):
    """One arm."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    way: Locating
    problems_directory: str
    tokenizer_directory: str = Field(description="of the model that made the attempts")
    search_directory: str | None = Field(
        default=None, description="encoder of the search service; None: BM25 by field alone"
    )
    result_limit_characters: int = Field(description="as in the harness of the attempts")
    attempts: tuple[LocatingRow, ...] = Field(description="of a model that is told the function")


class ScriptedLocatingResult(BaseModel):
    """The attempts with their locating step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: tuple[LocatingRow, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """What the script did on one problem."""

    is_found: bool
    calls: int
    written_tokens: int
    read_tokens: int


def main(request: ScriptedLocatingRequest, workspace: Workspace) -> ScriptedLocatingResult:
    """Locates every problem that was attempted, once."""
    directory = Path(request.problems_directory)
    wanted = {row.problem_id for row in request.attempts}
    problems = [item for item in load_problems(directory) if item.problem_id in wanted]
    names = {problem.repository for problem in problems}
    repositories = {item.name: item for item in load_repositories(directory, names)}
    encoder = request.search_directory
    script = _Script(
        request,
        Renderer.load(Path(request.tokenizer_directory)),
        SearchService.load(None if encoder is None else Path(encoder)),
    )
    steps: dict[str, _Step] = {}
    for number, problem in enumerate(problems):
        steps[problem.problem_id] = script.locate(problem, repositories[problem.repository])
        workspace.progress.update(number + 1, len(problems), "problems located")
    return ScriptedLocatingResult(rows=tuple(_join(row, steps) for row in request.attempts))


def _join(row: LocatingRow, steps: dict[str, _Step]) -> LocatingRow:
    step = steps[row.problem_id]
    return row.model_copy(
        update={
            "located": step.is_found,
            "solved": row.solved and step.is_found,
            "turns": step.calls,
            "searches": step.calls,
            "generated_tokens": step.written_tokens,
            "read_tokens": step.read_tokens,
        }
    )


@dataclass(frozen=True, slots=True)
class _Script:
    """The demonstrator's locating step with the tools' answers."""

    request: ScriptedLocatingRequest
    renderer: Renderer
    search: SearchService

    def locate(self, problem: Problem, repository: PreparedRepository) -> _Step:
        """Runs it on the repository as the problem breaks it."""
        broken = problem.break_files(repository.files)
        asked: list[tuple[str, str]] = []

        def answer(call: str) -> str:
            result = self._answer(call, problem.problem_id, repository, broken)
            asked.append((call, result))
            return result

        description = read_description(problem.prompt)
        talk = locate(self.request.way, description, problem.path, problem.symbol)
        is_found = drive(talk, answer) is not None
        self.search.close_session(problem.problem_id)
        return _Step(
            is_found,
            len(asked),
            _count(self.renderer.encode_answer(call) for call, _ in asked),
            _count(self.renderer.append_results([result]) for _, result in asked),
        )

    def _answer(
        self,
        call: str,
        session_id: str,
        repository: PreparedRepository,
        broken: dict[str, bytes],
    ) -> str:
        query = call.partition(">")[2].rpartition("</")[0]
        if call.startswith("<codebase_search>"):
            self.search.add_repository(repository.fingerprint, repository.files)
            hits = self.search.search(session_id, repository.fingerprint, broken, query, MAX_HITS)
            result = list_hits(hits)
        else:
            files = {**repository.files, **broken}
            result = grep_files(
                {
                    path: content.decode(errors="replace")
                    for path, content in files.items()
                    if path.endswith(TEXT_SUFFIXES)
                },
                query,
            )
        return cut_middle(result, self.request.result_limit_characters)


def _count(pieces: Iterable[list[int]]) -> int:
    return sum(len(piece) for piece in pieces)
