"""Child entry: trajectories of finished runs become records that the encoder can learn from.

Joins two stages that do not know one another: what tasks/rollout stored is read here, what
tasks/retrieval learns from is written. It judges nothing: tasks/retrieval/traces.py does.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from ostinato.flows.drivers.problem_set import load_problems, load_repositories
from ostinato.infra.agent.search.chunks import Chunk, cut_chunks
from ostinato.infra.agent.transcript import CallStatus, ToolCallRecord, Transcript
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.tasks.records import Problem, Trajectory
from ostinato.tasks.retrieval.config import TraceRequest, TraceResult
from ostinato.tasks.retrieval.traces import TRACES_FILE, LineRange, TraceRecord
from ostinato.tasks.rollout.payload import group_from_bytes

_HUNK = re.compile(r"^@@ -(\d+),(\d+) ")
_HIT = re.compile(r"^([^\s:]+):(\d+)-(\d+) ")
_MATCH = re.compile(r"^([^\s:]+):(\d+):")
_WHOLE_FILE_LINES = 1 << 30
_PUBLISHED = "published"


def main(request: TraceRequest, workspace: Workspace) -> TraceResult:
    """Reads every committed group of the runs, at most `most_groups`, in the order of the runs."""
    problems_directory = Path(request.problems_directory)
    problems = {item.problem_id: item for item in load_problems(problems_directory)}
    names = {problem.repository for problem in problems.values()}
    repositories = {item.name: item for item in load_repositories(problems_directory, names)}
    keys = _group_keys(request, workspace)
    target = workspace.directory / _PUBLISHED
    target.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    objects = open_object_store(workspace.settings)
    with (target / TRACES_FILE).open("w", encoding="utf-8") as file:
        for number, key in enumerate(keys):
            for trajectory in group_from_bytes(objects.get_bytes(key)).trajectories:
                problem = problems.get(trajectory.problem_id)
                if problem is not None:
                    record = describe_trajectory(
                        trajectory, problem, repositories[problem.repository].files
                    )
                    file.write(record.model_dump_json() + "\n")
                    counts[problem.repository] += 1
            workspace.progress.update(number + 1, len(keys), "reading trajectories")
    return TraceResult(
        directory=str(target),
        num_groups=len(keys),
        num_traces=counts.total(),
        by_repository=dict(sorted(counts.items())),
    )


def _group_keys(request: TraceRequest, workspace: Workspace) -> list[str]:
    ledger = Ledger(workspace.settings.ledger_url)
    keys: dict[str, None] = {}
    for run_id in request.run_ids:
        rows = ledger.journal.rows(run_id)
        kept = (row for row in rows if row.object_key is not None)
        keys.update(dict.fromkeys(row.object_key for row in kept if row.object_key))
    return list(keys)[: request.most_groups]


def describe_trajectory(
    trajectory: Trajectory, problem: Problem, files: Mapping[str, bytes]
) -> TraceRecord:
    """What the attempt read, edited and was shown, in lines of the files it began with."""
    broken = {**files, **problem.break_files(files)}
    calls = list(_calls(trajectory.transcript))
    return TraceRecord(
        trajectory_id=trajectory.trajectory_id,
        problem_id=problem.problem_id,
        repository=problem.repository,
        failing_tests=tuple(
            test for test in problem.fail_to_pass if test not in problem.hidden_tests
        ),
        report=next((result for call, result in calls if call.tool == "run_terminal"), ""),
        reads=tuple(_unique(_reads(calls, broken))),
        edits=tuple(_unique(_edits(trajectory.changed_files))),
        shown=tuple(_unique(_shown(calls))),
        solved=trajectory.verdict is not None and trajectory.verdict.passed,
    )


def _calls(transcript: Transcript) -> Iterator[tuple[ToolCallRecord, str]]:
    for turn in transcript.turns:
        for call, result in zip(turn.calls, turn.results, strict=False):
            if call.status is CallStatus.OK:
                yield call, result


def _reads(
    calls: Iterable[tuple[ToolCallRecord, str]], files: Mapping[str, bytes]
) -> Iterator[LineRange]:
    for call, _ in calls:
        if call.tool != "read_file":
            continue
        path, _, symbol = call.arguments.get("path", "").partition("::")
        if path not in files:
            continue
        if not symbol:
            yield path, 1, _WHOLE_FILE_LINES
        for chunk in _chunks(path, files[path]) if symbol else ():
            if chunk.name == symbol or chunk.name.startswith(f"{symbol}."):
                yield path, chunk.first_line, chunk.last_line


@lru_cache(maxsize=64)
def _chunks(path: str, content: bytes) -> list[Chunk]:
    """The attempts of a group begin with the same file."""
    return cut_chunks(path, content.decode(errors="replace"))


def _edits(changed_files: Mapping[str, str]) -> Iterator[LineRange]:
    for path, patch in sorted(changed_files.items()):
        hunk = _HUNK.match(patch)
        if hunk is not None:
            first, count = int(hunk[1]), int(hunk[2])
            yield path, first, first + max(count, 1) - 1


def _shown(calls: Iterable[tuple[ToolCallRecord, str]]) -> Iterator[LineRange]:
    for call, result in calls:
        for line in result.splitlines():
            if call.tool == "codebase_search" and (hit := _HIT.match(line)):
                yield hit[1], int(hit[2]), int(hit[3])
            elif call.tool == "grep" and (match := _MATCH.match(line)):
                yield match[1], int(match[2]), int(match[2])


def _unique(ranges: Iterable[LineRange]) -> list[LineRange]:
    return list(dict.fromkeys(ranges))
