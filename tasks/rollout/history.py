"""Results of committed groups on disk: what the curriculum of a resumed run learns from."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ostinato.infra.platform.telemetry import MetricsLog, read_lines
from ostinato.tasks.rollout.curriculum import Curriculum


@dataclass(frozen=True, slots=True)
class GroupResult:
    """One committed group."""

    group_id: str
    problem_id: str
    attempts: int
    solved: int


class GroupHistory:
    """Append-only results of one run."""

    def __init__(self, path: Path) -> None:
        self._log = MetricsLog(path)
        self._lines = 0

    def append(self, result: GroupResult) -> None:
        self._log.append(self._lines, asdict(result))
        self._lines += 1

    def replay(self, curriculum: Curriculum) -> int:
        """Teaches a curriculum everything in the file, each group once; returns how many."""
        results: dict[str, dict[str, Any]] = {}
        for row in read_lines(self._log.path):
            results.setdefault(row["group_id"], row)
        for row in results.values():
            curriculum.observe(row["problem_id"], attempts=row["attempts"], solved=row["solved"])
        self._lines = len(results)
        return self._lines
