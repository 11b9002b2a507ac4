"""The loop of examples/loop.py runs as it is written: attempts in boxes, verdicts, steps, versions, a checkpoint."""

import re
import subprocess
import sys
from pathlib import Path

from ostinato.models.checkpoint import load_checkpoint
from ostinato.tasks.problems.published import REPOSITORIES_FOLDER, write_problems
from tests.fakes.one_line_problem import break_line, write_package

LOOP = Path(__file__).parents[2] / "examples" / "loop.py"
SOURCE = "def one():\n    return 1\n\n\ndef two():\n    return 2\n"
TESTS = "from pkg.code import one\n\n\ndef test_one():\n    assert one() == 1\n"


def test_loop_is_one_page() -> None:
    assert len(LOOP.read_text().splitlines()) <= 150


def test_loop_takes_its_steps_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    problems = tmp_path / "problems"
    made = write_package(problems / REPOSITORIES_FOLDER / "pkg" / "files", SOURCE, TESTS)
    made.save()
    failing = ("tests/test_code.py::test_one",)
    problem = break_line(made, "    return 1", "    return 3", symbol="one", failing=failing)
    write_problems(problems, [problem])
    sizes = ("--steps", "1", "--groups", "1", "--group-size", "2", "--out", str(tmp_path / "out"))
    for step in ("1", "2"):  # the second run goes on from the first one's weights and optimiser
        ran = subprocess.run(
            [sys.executable, str(LOOP), str(problems), *sizes],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        shown = rf"step {step}: \d+% solved, loss .* k3 .*version {step}"
        assert re.search(shown, ran.stdout), ran.stdout
    saved = load_checkpoint(tmp_path / "out" / "steps" / "step-00000002")
    assert saved.metadata["step"] == 2
