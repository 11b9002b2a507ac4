"""The committed controls: they are README's, and stand beside a run's own in its report."""

from pathlib import Path

import pytest

from ostinato.flows.reporting.committed_controls import committed_rows, read_committed
from ostinato.flows.reporting.control_rows import control_rows
from ostinato.flows.stages import chain
from ostinato.flows.stages.scorecards import ROWS_FILE
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.evaluation.statistics import AttemptRow
from tests.fakes.finished_stages import open_context

README = Path(__file__).parents[4] / "README.md"


def test_every_committed_seed_is_a_row_of_readme() -> None:
    table = [line for line in README.read_text().split("\n") if line.startswith("| ")]
    for found in read_committed():
        mean, low, high = (100 * value for value in found.difference)
        rates = f"{100 * found.start_solved:.1f} -> {100 * found.trained_solved:.1f} %"
        difference = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
        tokens = f"{found.tokens[0]:.0f} -> {found.tokens[1]:.0f}"
        row = f"| {found.seed} | {rates} | {difference} | {tokens} |"
        assert any(line.startswith(row) for line in table), row
    assert [(found.recipe, found.seed) for found in read_committed()] == [
        ("nano", 0), ("nano", 1), ("nano", 2),
    ]  # fmt: skip


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


@pytest.mark.parametrize(("name", "count"), [("nano", 3), ("mine", 0)])
def test_they_stand_below_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    context = open_context(tmp_path, name)
    rows = control_rows(context, evaluated(context, "+-"), evaluated(context, "++"))
    own, committed = rows[:3], rows[3:]
    assert [row.measure.partition(": ")[2] for row in own] == [
        "start", "restart at equal tokens", "best of n at equal tokens",
    ]  # fmt: skip
    assert committed == committed_rows(name)
    assert len(committed) == count


def test_the_start_is_compared_in_all_that_controls_are_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    context = open_context(tmp_path, "mine")
    start, *others = control_rows(context, evaluated(context, "+-"), evaluated(context, "++"))
    assert (start.before, start.after) == ("50.0%", "100.0%")
    assert "first edit 0.0% and 0.0%, tool calls 2.00 and 2.00" in start.note
    assert "limit or repeat 0.0% and 0.0%" in start.note
    assert all("90 and 90 tokens" in row.note for row in (start, *others))
    assert not any("first edit" in row.note for row in others)  # no figure of one attempt
