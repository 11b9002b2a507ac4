"""The results of groups on disk, one JSON line each: what the curriculum of a resumed run learns
from.

A line is appended after its group was committed; a torn or repeated line is ignored when read.
"""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ostinato.infra.platform.telemetry import MetricsLog
from ostinato.tasks.rollout.curriculum import Curriculum


class GroupResult(BaseModel):
    """One committed group."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    group_id: str
    problem_id: str
    attempts: int
    solved: int


class GroupHistory:
    """Append-only results of one run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = MetricsLog(path)
        self._lines = 0

    def append(self, result: GroupResult) -> None:
        """Adds one result."""
        self._log.append(self._lines, result.model_dump())
        self._lines += 1

    def replay(self, curriculum: Curriculum) -> int:
        """Teaches a curriculum everything in the file; returns how many groups."""
        results = self._read()
        for result in results:
            curriculum.observe(result.problem_id, attempts=result.attempts, solved=result.solved)
        self._lines = len(results)
        return len(results)

    def _read(self) -> list[GroupResult]:
        if not self._path.exists():
            return []
        results: dict[str, GroupResult] = {}
        for line in self._path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the torn line of a killed writer
            result = GroupResult.model_validate(row)
            results.setdefault(result.group_id, result)
        return list(results.values())
