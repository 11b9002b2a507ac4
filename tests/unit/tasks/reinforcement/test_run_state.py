"""Files of a run."""

import json
from pathlib import Path

from ostinato.tasks.reinforcement.run_state import RunState, StatusFile


def test_used_seconds_survive_the_process(tmp_path: Path) -> None:
    assert RunState.load(tmp_path).used_seconds == 0.0
    RunState.load(tmp_path).save(12.5)
    assert RunState.load(tmp_path).used_seconds == 12.5


def test_status_names_what_waits_for_what_since_when(tmp_path: Path) -> None:
    waits = {"trainer": {"for": "ready groups", "detail": "has 3, wants 16", "since": 7.0}}
    StatusFile(tmp_path, "run").write("running", waits, steps_done=4)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["waits"] == waits
    assert (status["run"], status["phase"], status["steps_done"]) == ("run", "running", 4)
