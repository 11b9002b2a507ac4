"""Controls of a report: what the start does as it is, started over and at best of n."""

from pathlib import Path

import pytest

from ostinato.flows.reporting.evaluations import control_rows
from ostinato.flows.stages import chain
from ostinato.flows.stages.chain import ROWS_FILE
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.evaluation.statistics import AttemptRow
from tests.fakes.finished_stages import open_context


def evaluated(context: StageContext, solved: str) -> ArtifactRef:
    """An evaluation of ten problems; + solves."""
    rows = [
        AttemptRow(
            problem_id=f"p{index}",
            attempt=attempt,
            solved=mark == "+",
            generated_tokens=90,
            turns=1,
            tool_calls=2,
            broken_calls=0,
            function=f"f{index}",
        )
        for index in range(10)
        for attempt, mark in enumerate(solved)
    ]
    text = "\n".join(row.model_dump_json() for row in rows)

    def build(directory: Path) -> tuple[Path, dict]:
        return chain.one_file(directory, ROWS_FILE, text), {}

    return context.ensure("evaluation", {"solved": solved}, (), build)


def test_the_start_is_compared_in_all_that_controls_are_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    context = open_context(tmp_path, "mine")
    rows = control_rows(context, evaluated(context, "+-"), evaluated(context, "++"))
    assert [row.measure.partition(": ")[2] for row in rows] == [
        "start", "restart at equal tokens", "best of n at equal tokens",
    ]  # fmt: skip
    start, *others = rows
    assert (start.before, start.after) == ("50.0%", "100.0%")
    assert "first edit 0.0% and 0.0%, tool calls 2.00 and 2.00" in start.note
    assert "limit or repeat 0.0% and 0.0%" in start.note
    assert all("90 and 90 tokens" in row.note for row in (start, *others))
    assert not any("first edit" in row.note for row in others)  # no figure of one attempt
