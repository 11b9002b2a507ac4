"""A problem set certified by the command, a checkpoint's difficulty included."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from tests.fakes.finished_stages import open_context
from tests.fakes.miniature import make_checkpoint, make_problem_set


@pytest.mark.slow
def test_a_checkpoint_tells_the_difficulty_of_the_problems_it_was_tried_on(
    home: Path, tmp_path: Path
) -> None:
    context = open_context(tmp_path, "mine")
    made = context.ensure("reinforcement", {}, (), lambda it: (make_checkpoint(it / "made"), {}))
    problems = make_problem_set(tmp_path / "set")
    command = ["certify", str(problems), "--limit", "1", "--hacks", "0", "--repeats", "1"]
    command += ["--checkpoint", str(made), "--attempts", "2", "--report", str(tmp_path / "report")]
    done = CliRunner().invoke(app, command)
    assert f"{made} solves 0.0%" in done.output, done.output  # its weights are random
    written = tmp_path / "report" / "certificate.json"
    difficulty = json.loads(written.read_text())["certificate"]["difficulty"]
    assert difficulty["attempts_per_problem"] == 2
    assert list(difficulty["solved"].values()) == [0.0]
    known = CliRunner().invoke(app, ["certify", str(written), "--verify"])
    assert "valid signature" in known.output


def test_a_wrong_recipe_or_checkpoint_is_refused_before_a_problem_is_tried(
    home: Path, tmp_path: Path
) -> None:
    problems = make_problem_set(tmp_path / "set")
    for wrong, said in (
        (["--recipe", "nosuch"], "recipe 'nosuch' not found"),
        (["--set", "harness.max_turn=3"], "harness.max_turn: unknown key"),
        (["--checkpoint", "candidate/nosuch@1"], "candidate/nosuch@1"),
    ):
        done = CliRunner().invoke(app, ["certify", str(problems), *wrong])
        assert said in str(done.exception), done.output
        assert not list((home / "certificates").glob("*/*.jsonl"))
