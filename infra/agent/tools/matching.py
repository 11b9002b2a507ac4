"""Finds the text that an edit replaces.

Tried in this order: an exact match; one that ignores line ends and trailing white space; one whose
whole stretch is indented otherwise. Several matches of a kind are an error.
"""

import difflib
from dataclasses import dataclass

MAX_COMPARED_LINES = 20_000
CONTEXT_LINES = 2


class NoMatch(Exception):
    """There is no stretch to edit, or more than one. The message is shown to the model."""


@dataclass(frozen=True, slots=True)
class Edited:
    """A file after an edit. `how` is exact, white space or indentation."""

    text: str
    how: str
    replacements: int = 1


def replace_text(text: str, old: str, new: str, *, all_of_them: bool, exact: bool) -> Edited:
    """`text` with `old` replaced by `new`. NoMatch when `old` matches nowhere, or more than once
    without `all_of_them`. `exact`: white space is not forgiven.
    """
    if not old:
        raise NoMatch("old is empty, wanted the text to replace; write_file makes a whole file")
    count = text.count(old)
    if count == 1 or (count and all_of_them):
        return Edited(text.replace(old, new), "exact", count)
    if count > 1:
        lines = ", ".join(str(line) for line in _lines_of(text, old)[:8])
        raise NoMatch(
            f"old occurs {count} times (lines {lines}), wanted once: give more lines around it"
        )
    if not exact and not all_of_them:
        for how, found in (
            ("white space", _match_lines(text, old, _trimmed)),
            ("indentation", _match_lines(text, old, str.strip)),
        ):
            if len(found) > 1:
                starts = ", ".join(str(start + 1) for start in found[:8])
                raise NoMatch(f"old matches at lines {starts} but for {how}, wanted once")
            if found:
                edited = _splice(text, old, new, found[0], how)
                if edited is not None:
                    return Edited(edited, how)
    raise NoMatch(f"old does not occur{_closest(text, old)}")


def _lines_of(text: str, old: str) -> list[int]:
    lines, position = [], text.find(old)
    while position >= 0:
        lines.append(text.count("\n", 0, position) + 1)
        position = text.find(old, position + len(old))
    return lines


def _trimmed(line: str) -> str:
    return line.rstrip()


def _old_lines(old: str) -> list[str]:
    lines = old.replace("\r\n", "\n").split("\n")
    return lines[:-1] if len(lines) > 1 and lines[-1] == "" else lines


def _match_lines(text: str, old: str, normal) -> list[int]:  # noqa: ANN001
    """Indices of the lines where `old` begins when both are compared through `normal`."""
    wanted = [normal(line) for line in _old_lines(old)]
    if not any(line.strip() for line in wanted):
        return []
    lines = [normal(line) for line in text.split("\n")]
    last = len(lines) - len(wanted)
    return [start for start in range(last + 1) if lines[start : start + len(wanted)] == wanted]


def _splice(text: str, old: str, new: str, start: int, how: str) -> str | None:
    """The file with the matched lines replaced. None when the indentation shifts unevenly."""
    lines = text.split("\n")
    replaced = lines[start : start + len(_old_lines(old))]
    fresh = _old_lines(new) if new else []
    if how == "indentation":
        shift = _shift(_old_lines(old), replaced)
        if shift is None:
            return None
        shifted = [_indent_by(line, *shift) for line in fresh]
        if any(line is None for line in shifted):
            return None
        fresh = [line for line in shifted if line is not None]
    ending = "\r" if replaced and all(line.endswith("\r") for line in replaced) else ""
    fresh = [line.rstrip("\r") + ending for line in fresh]
    return "\n".join([*lines[:start], *fresh, *lines[start + len(replaced) :]])


def _shift(old: list[str], found: list[str]) -> tuple[str, str] | None:
    """Indentation removed and added at every line. None when that differs between lines."""
    shifts: set[tuple[str, str]] = set()
    for before, after in zip(old, found, strict=True):
        if not before.strip():
            continue
        was, now = _indent(before), _indent(after)
        if now.endswith(was):
            shifts.add(("", now[: len(now) - len(was)]))
        elif was.endswith(now):
            shifts.add((was[: len(was) - len(now)], ""))
        else:
            return None
    return shifts.pop() if len(shifts) == 1 else None


def _indent_by(line: str, removed: str, added: str) -> str | None:
    if not line.strip():
        return line
    if removed and not line.startswith(removed):
        return None
    return added + line.removeprefix(removed)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _closest(text: str, old: str) -> str:
    """The stretch most like `old`, with its line numbers, as the end of a sentence."""
    wanted, lines = _old_lines(old), text.split("\n")
    if len(lines) > MAX_COMPARED_LINES or not any(line.strip() for line in wanted):
        return ""
    anchor = max(wanted, key=lambda line: len(line.strip())).strip()
    known = {line.strip() for line in lines if line.strip()}
    near = difflib.get_close_matches(anchor, known, n=1, cutoff=0.5)
    if not near:
        return ""
    index = next(index for index, line in enumerate(lines) if line.strip() == near[0])
    first = max(0, index - CONTEXT_LINES)
    shown = lines[first : index + CONTEXT_LINES + 1]
    numbered = "\n".join(f"{first + offset + 1}\t{line}" for offset, line in enumerate(shown))
    return f"; closest is\n{numbered}"
