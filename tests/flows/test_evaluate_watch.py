"""`ostinato evaluate --watch` through the command line: lines of progress on stderr, and nothing but the scorecard on stdout."""

import json
import re
from pathlib import Path

import pytest

from ostinato.flows.reporting.evaluations import EvaluationReport
from ostinato.flows.stages.console import WatchLines
from ostinato.tasks.records import Split
from tests.fakes.finished_stages import add_own_problems, open_context
from tests.fakes.miniature import make_checkpoint, make_problem_set
from tests.fakes.processes import run_command
from tests.flows.test_checkpoint_evaluation import SUITE, problems_result

LINE = re.compile(
    r"^evaluation of reinforced, held_out: (\d+)/8 attempts, solve rate (\d\.\d\d)$", re.M
)


def test_lines_come_at_intervals_and_the_last_is_never_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = iter((0.0, 0.0, 1.0, 2.0, 4.0, 4.0, 5.0, 5.0, 6.0, 6.0))
    lines = WatchLines("pretraining", lambda: next(clock))
    for done in range(5):
        lines.update(done, 10, "steps")
    lines.flush()
    lines.flush()
    said = capsys.readouterr().err.splitlines()
    assert said == [f"pretraining: {done}/10 steps" for done in (0, 3, 4)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_watched_evaluation_tells_its_progress_where_there_is_no_terminal(
    home: Path, tmp_path: Path
) -> None:
    context = open_context(tmp_path, "mine")
    problems = add_own_problems(
        context,
        lambda folder: (
            make_problem_set(folder / "set", Split.HELD_OUT),
            {"summary": problems_result()},
        ),
    )
    checkpoint = context.ensure(
        "reinforcement", {}, (problems,), lambda folder: (make_checkpoint(folder / "made"), {})
    )
    arguments = ["evaluate", "--checkpoint", str(checkpoint), "--suite", SUITE]
    arguments += ["--recipe", str(tmp_path / "mine.toml"), "--watch", "--json"]
    done = run_command(home, *arguments, timeout=500)
    assert done.returncode == 0, done.stderr  # no champion, no floor: the gate passes
    report = EvaluationReport.model_validate(json.loads(done.stdout))
    told = LINE.findall(done.stderr)
    assert told[-1] == ("8", f"{report.scorecards[0].average.mean:.2f}"), done.stderr
    assert len(set(told)) == len(told)
