"""Short words for what the model is shown: test reports and cut outputs.

Test reports and long text in, a line or a bounded text out.
"""

from infra.harness.regions import Region
from infra.sandbox.protocol import TestReport
from models.rendering.vocabulary import line_tag

MESSAGE_LIMIT_CHARACTERS = 80


def describe_report(report: TestReport, region: Region | None) -> str:
    """`passed`, or `failed: Error: message` with the line of the region where it arose."""
    failure = report.first_failure
    if report.passed:
        return "passed"
    if report.tampering or failure is None:
        statuses = sorted({status for status in report.outcomes.values() if status != "passed"})
        return f"failed: {' '.join(statuses) or 'no tests ran'}"
    message = " ".join(failure.message.split())
    if len(message) > MESSAGE_LIMIT_CHARACTERS:
        message = message[:MESSAGE_LIMIT_CHARACTERS].rstrip() + ".."
    text = (
        f"failed: {failure.error_type}: {message}" if message else f"failed: {failure.error_type}"
    )
    if region is not None:
        for frame in reversed(failure.frames):
            number = region.number_at(frame.line_number) if frame.path == region.path else None
            if number is not None:
                return f"{text} at {line_tag(number)}"
    return text


def cut_middle(text: str, limit_characters: int) -> str:
    """`text`, or its two ends around a note when it is longer than the limit."""
    excess = len(text) - limit_characters
    if excess <= 0:
        return text
    note = f"\n[{excess + 32} characters cut]\n"
    keep = max(limit_characters - len(note), 0)
    head = (keep + 1) // 2
    return text[:head] + note + text[len(text) - (keep - head) :]
