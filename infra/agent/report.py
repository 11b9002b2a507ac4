"""Short words for what the model is shown: test reports and cut outputs.

Test reports and long text in, a line or a bounded text out.
"""

from collections.abc import Sequence

from ostinato.infra.agent.regions import Region
from ostinato.infra.sandbox.protocol import TestReport
from ostinato.models.rendering.vocabulary import line_tag

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


def cut_lines(text: str, limit_characters: int) -> str:
    """`text`, or its first and last whole lines around a note that counts what is missing.

    The result is never longer than the limit (at least 80 characters).
    """
    if len(text) <= limit_characters:
        return text
    lines = text.split("\n")
    keep = limit_characters - len(_note(len(lines), len(text)))
    head = _take_lines(lines, (keep + 1) // 2)
    tail = _take_lines(lines[len(head) :][::-1], keep // 2)[::-1]
    if not head or not tail:  # a line longer than its half: cut inside it
        return cut_middle(text, limit_characters)
    kept = "\n".join(head + tail)
    note = _note(len(lines) - len(head) - len(tail), len(text) - len(kept))
    return "\n".join([*head, note.strip("\n"), *tail])


def _note(num_lines: int, num_characters: int) -> str:
    return f"\n[{num_lines} lines, {num_characters} characters cut: ask for less at a time]\n"


def _take_lines(lines: list[str], limit_characters: int) -> list[str]:
    taken: list[str] = []
    for line in lines:
        limit_characters -= len(line) + 1
        if limit_characters < -1:
            break
        taken.append(line)
    return taken


def share_out(total: int, wanted: Sequence[int]) -> list[int]:
    """`total` shared so that no one gets more than wanted and the short ones all they want."""
    shares = [0] * len(wanted)
    left, waiting = total, sorted(range(len(wanted)), key=lambda index: wanted[index])
    for position, index in enumerate(waiting):
        shares[index] = min(wanted[index], left // (len(waiting) - position))
        left -= shares[index]
    return shares
