"""A real RL run whose attempts are programs in boxes, killed between steps and started again."""

from functools import partial
from pathlib import Path

import pytest

from ostinato.flows.reporting.attempts import describe, find_attempts
from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.extensions import COMMAND
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from tests.fakes.foreign_programs import python_program
from tests.fakes.reinforcement import GROUPS_PER_STEP, miniature_request
from tests.faults.killed_runs import kill_after_step, kill_and_resume

STEPS = 2
# two turns that go on from one another, and a sub-agent
PROGRAM = """
said = [user("one")]
said += [chat(said, max_tokens=8), user("more")]
chat(said, max_tokens=8)
chat([user("two")], max_tokens=8)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_a_killed_run_of_programs_loses_nothing_and_trains_nothing_twice(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", cpu_limit=2)
    harness = HarnessConfig(
        program=COMMAND,
        command=python_program(PROGRAM),
        max_turns=4,
        max_generated_tokens=48,
        context_tokens=128,
    )
    request, run = miniature_request(tmp_path, "foreign", STEPS, harness=harness), tmp_path / "run"

    kill_and_resume(request, run, settings, partial(kill_after_step, step=1))
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["parity_alarms"] for line in lines] == [0] * STEPS
    assert lines[0]["parity_one_cache_k3_nats"] <= 1e-6

    attempts = [one for one in find_attempts(settings, "foreign") if one.segments]
    assert len(attempts) >= 2 * STEPS * GROUPS_PER_STEP
    for one in attempts:
        turns = one.facts["transcript"]["turns"]
        sampled = sum(segment.sampled_tokens for segment in one.segments)
        assert sampled == sum(turn["generated_tokens"] for turn in turns)
    branched = next(one for one in attempts if len(one.facts["transcript"]["turns"]) == 3)
    assert len(branched.segments) == 2
    shown = list(describe([branched]))
    assert shown[shown.index("\nBRANCHES") + 1 :][:2] == [" 1 -  2", " 3"]
