"""`ostinato problems probe`: killed and run again, shown, and what RL draws from it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import (
    PROCESS,
    REQUEST,
    RequestEnvelope,
    Workspace,
    read_record,
)
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_lines
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest
from ostinato.tasks.evaluation.checkpoint.run import main as evaluate
from ostinato.tasks.evaluation.statistics import AttemptRow, scorecard_from
from ostinato.tasks.records import Scorecard, Split
from ostinato.tasks.reinforcement.records import ReinforcementResult
from ostinato.tasks.rollout.config import PROBES_FILE, CurriculumConfig
from tests.fakes.finished_stages import add_own_problems, open_context
from tests.fakes.miniature import make_checkpoint, make_problem_set
from tests.fakes.processes import COMMAND
from tests.fakes.reinforcement import miniature_request
from tests.flows.test_checkpoint_evaluation import problems_result

ATTEMPTS = 8
AMOUNTS = """
[harness]
max_turns = 2
max_generated_tokens = 48
context_tokens = 128
"""


def start(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, *arguments],
        env={**os.environ, "OSTINATO_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop(home: Path, command: subprocess.Popen[str]) -> tuple[Path, bytes]:
    """Stops the command with Ctrl-C and kills a shard that has finished an attempt. Returns the shard's file of rows
    and what it held.
    """
    while command.poll() is None:
        for rows in home.glob("runs/*/probes-*/shard*/rows.jsonl"):
            if rows.read_bytes().endswith(b"\n"):
                mark = json.loads((rows.parent / PROCESS).read_text())
                os.kill(mark["pid"], signal.SIGKILL)
                command.send_signal(signal.SIGINT)
                return rows, rows.read_bytes().rpartition(b"\n")[0]
        time.sleep(0.02)
    raise AssertionError(command.communicate())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_command_that_is_run_again_equals_probes_in_one_go_and_is_shown(
    home: Path, tmp_path: Path
) -> None:
    context = open_context(tmp_path, "mine", AMOUNTS)

    def publish(folder: Path) -> tuple[Path, dict]:
        directory = make_problem_set(folder / "published", Split.TRAIN)
        return directory, {"summary": problems_result()}

    problems = add_own_problems(context, publish)
    made = context.ensure("reinforcement", {}, (), lambda it: (make_checkpoint(it / "made"), {}))
    probe = ["problems", "probe", "--recipe", str(tmp_path / "mine.toml"), "--json"]
    probe += ["--checkpoint", str(made), "--attempts", str(ATTEMPTS)]

    first = start(home, probe)
    rows, kept = stop(home, first)
    assert first.communicate()[0] == ""
    assert first.returncode == 130
    second = start(home, probe)
    answer, said = second.communicate()
    assert second.returncode == 0, said
    assert json.loads(answer) == {"probes": "probes/mine@1"}
    assert f"attempts of {made} at the training problems of {problems}" in said
    assert f"  0 of {ATTEMPTS}: " in said
    assert rows.read_bytes().startswith(kept)  # none is made again

    probes = context.artifacts.get("probes/mine@1")
    card = Scorecard.model_validate_json((context.directory_of(probes) / PROBES_FILE).read_bytes())
    assert {(score.attempts, score.problem_id) for score in card.problems} == {
        (ATTEMPTS, f"pkg-{number}") for number in range(4)
    }
    told = read_record(rows.parents[1] / REQUEST, RequestEnvelope)
    assert told is not None
    request = EvaluationRequest.model_validate(told.request)
    one_go = evaluate(request, Workspace.open(tmp_path / "one-go", context.settings)).scorecard
    assert card.problems == one_go.problems  # the means of attempts hold their seconds

    shown = start(home, ["show", "probes/mine@1"])
    text, said = shown.communicate()
    assert shown.returncode == 0, said
    counts = [line for line in text.splitlines() if "problems solved in" in line]
    assert len(counts) == ATTEMPTS + 1
    assert str(made) in text


@pytest.mark.nightly  # by day the rule is held by tests/unit/tasks/rollout/test_probes.py
@pytest.mark.timeout(600)
def test_rl_draws_only_the_problems_that_its_probes_leave(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", cpu_limit=2)
    request = miniature_request(tmp_path, "probed", 2)
    (tmp_path / "probes").mkdir()
    solved = {"pkg-0": 4, "pkg-1": 2, "pkg-2": 0, "pkg-3": 4}
    rows = [
        AttemptRow(
            problem_id=name,
            attempt=attempt,
            solved=attempt < count,
            generated_tokens=60,
            turns=1,
            tool_calls=1,
            broken_calls=0,
        )
        for name, count in solved.items()
        for attempt in range(4)
    ]
    card = scorecard_from(rows, suite="probes", checkpoint="c", temperature=1.0)
    (tmp_path / "probes" / PROBES_FILE).write_text(card.model_dump_json())
    curriculum = CurriculumConfig(revisit_groups=1, probes="start", unsolved_share=0.0)
    rollout = request.rollout.model_copy(update={"curriculum": curriculum})
    probed = {"rollout": rollout, "probes_directory": str(tmp_path / "probes")}
    run_child(
        "ostinato.tasks.reinforcement.run:main",
        request.model_copy(update=probed),
        ReinforcementResult,
        directory=tmp_path / "run",
        settings=settings,
    )
    drawn = {row["problem_id"] for row in read_lines(tmp_path / "run" / "groups.jsonl")}
    assert drawn == {"pkg-1"}
