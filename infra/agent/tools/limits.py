"""Tool results cut to the lengths that a model is shown."""

from collections.abc import Sequence


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
    """`text`, or its first and last whole lines around a note that counts the missing ones.

    The result is never longer than the limit (at least 80 characters).
    """
    if len(text) <= limit_characters:
        return text
    lines = text.split("\n")
    keep = limit_characters - len(_note(len(lines), len(text)))
    head = _take_lines(lines, (keep + 1) // 2)
    tail = _take_lines(lines[len(head) :][::-1], keep // 2)[::-1]
    if not head or not tail:  # a line is longer than its half of the limit: cut inside it
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
    """Splits `total` evenly, except that none gets more than it wants and the others share the rest."""
    shares = [0] * len(wanted)
    left, waiting = total, sorted(range(len(wanted)), key=lambda index: wanted[index])
    for position, index in enumerate(waiting):
        shares[index] = min(wanted[index], left // (len(waiting) - position))
        left -= shares[index]
    return shares
