"""Trajectories become lines: what was read, edited and shown, in the files as they were found."""

from ostinato.flows.drivers.search_traces import describe_trajectory
from ostinato.infra.agent.transcript import (
    CallStatus,
    EndReason,
    ToolCallRecord,
    Transcript,
    TurnRecord,
)
from ostinato.tasks.records import (
    LineEdit,
    Outcome,
    Problem,
    RewardReport,
    Split,
    Trajectory,
    Verdict,
)

FILES = {"pkg/a.py": b"def first():\n    return 1\n\n\ndef second():\n    return 2\n"}
PROBLEM = Problem(
    problem_id="p",
    repository="repo",
    repository_fingerprint="f",
    kind="mutation",
    operator="constant",
    path="pkg/a.py",
    symbol="first",
    first_line=1,
    last_line=2,
    prompt="Fix first in pkg/a.py",
    edits=(
        LineEdit(
            path="pkg/a.py", line_number=2, gold_text="    return 1", broken_text="    return 7"
        ),
    ),
    fail_to_pass=("tests/test_a.py::test_first",),
    pass_to_pass=(),
    split=Split.TRAIN,
)


def turn(tool: str, arguments: dict[str, str], result: str, status: CallStatus) -> TurnRecord:
    call = ToolCallRecord(
        tool=tool,
        arguments=arguments,
        status=status,
        result_characters=len(result),
        wall_seconds=0.0,
    )
    return TurnRecord(generated_tokens=1, text="", calls=(call,), results=(result,))


def trajectory(turns: tuple[TurnRecord, ...], patch: str) -> Trajectory:
    transcript = Transcript(
        segments=(), turns=turns, end_reason=EndReason.FINISHED, final_message="", wall_seconds=0.0
    )
    verdict = Verdict(
        problem_id="p", passed=True, tests_required=1, tests_passed=1, outcomes={}, detail=""
    )
    return Trajectory(
        trajectory_id="t",
        group_id="g",
        problem_id="p",
        attempt=0,
        seed=0,
        outcome=Outcome.FINISHED,
        reason="finished",
        verdict=verdict,
        reward=RewardReport(total=0.0, terms={}),
        transcript=transcript,
        changed_files={"pkg/a.py": patch},
        started_at=0.0,
        finished_at=1.0,
    )


def test_reads_edits_and_hits_become_line_ranges() -> None:
    ok, failed = CallStatus.OK, CallStatus.ENVIRONMENT
    turns = (
        turn("read_file", {"path": "pkg/a.py::second"}, "...", ok),
        turn("read_file", {"path": "pkg/gone.py"}, "error", failed),
        turn("run_terminal", {"command": "pytest"}, "failed: AssertionError", ok),
        turn("codebase_search", {"query": "x"}, "pkg/a.py:1-4 def first():", ok),
        turn("grep", {"query": "second"}, "pkg/a.py:5:def second():", ok),
    )
    record = describe_trajectory(
        trajectory(turns, "@@ -2,1 +2,1 @@\n-     return 7\n+     return 1"), PROBLEM, FILES
    )

    assert record.reads == (("pkg/a.py", 5, 7),)
    assert record.edits == (("pkg/a.py", 2, 2),)
    assert record.shown == (("pkg/a.py", 1, 4), ("pkg/a.py", 5, 5))
    assert record.report == "failed: AssertionError"
    assert record.solved


def test_an_insertion_touches_the_line_it_stands_at() -> None:
    record = describe_trajectory(trajectory((), "@@ -3,0 +3,1 @@\n+ x"), PROBLEM, FILES)

    assert record.edits == (("pkg/a.py", 3, 3),)
    assert record.report == ""
