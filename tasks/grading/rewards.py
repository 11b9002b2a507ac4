"""From a verdict and a transcript to a reward with named terms.

Owns `compute_reward`. Each term of the report is already weighted and signed, so `total` is their
plain sum. No outcome is neutral: an attempt that breaks its calls, edits nothing or runs out of
turns is graded like any other.
"""

from collections.abc import Mapping

from infra.harness.transcript import CallStatus, Transcript
from infra.sandbox.repository import PreparedRepository
from tasks.grading.config import GradingConfig
from tasks.grading.length import length_penalty, measure_effort, total_effort
from tasks.records import Problem, RewardReport, Verdict

_BROKEN = frozenset({CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.INVALID_ARGUMENTS})
_EDIT_TOOLS = frozenset({"edit_file", "write_file"})
_TEST_TOOL = "run_terminal"


def compute_reward(
    problem: Problem,
    verdict: Verdict,
    transcript: Transcript,
    changed_files: Mapping[str, bytes | None],
    repository: PreparedRepository,
    config: GradingConfig,
) -> RewardReport:
    """All terms, zero ones too."""
    effort = total_effort(measure_effort(transcript), config.effort)
    num_broken = min(count_broken_calls(transcript), config.most_broken_calls)
    terms = {
        "correctness": config.correctness * float(verdict.passed),
        "length": -config.length * length_penalty(effort, config.length_k, config.length_q),
        "broken_calls": -config.broken_call * num_broken,
        "no_edit": -config.no_edit * float(not has_edit(problem, changed_files, repository)),
        "unverified": -config.unverified * float(not is_verified(transcript)),
    }
    return RewardReport(total=sum(terms.values()), terms=terms)


def count_broken_calls(transcript: Transcript) -> int:
    """Calls that the harness could not run as written."""
    return sum(call.status in _BROKEN for turn in transcript.turns for call in turn.calls)


def has_edit(
    problem: Problem, changed_files: Mapping[str, bytes | None], repository: PreparedRepository
) -> bool:
    """Whether the end state differs from the broken state the attempt began with."""
    start = problem.break_files(repository.files)
    end = repository.keep_editable(changed_files)
    paths = {*start, *end}
    return any(
        end.get(path, repository.files.get(path)) != start.get(path, repository.files.get(path))
        for path in paths
    )


def is_verified(transcript: Transcript) -> bool:
    """Whether a command ran in or after the turn of the last edit; true when nothing was edited."""
    verified = True
    for turn in transcript.turns:
        for call in turn.calls:
            if call.tool in _EDIT_TOOLS and call.status is CallStatus.OK:
                verified = False
            elif call.tool == _TEST_TOOL:
                verified = True
    return verified
