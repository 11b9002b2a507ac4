"""Finds the text that an edit replaces.

Tried in this order: an exact match, a match without line ends and trailing white space, and a match with another
indentation of all lines. Several matches of a kind are an error. Lines that the edit repeats keep their bytes. New
lines get the line ends of their neighbours, unless the edit itself contains a carriage return.
"""

import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.infra.platform.diffs import split_lines

MAX_COMPARED_LINES = 20_000
CONTEXT_LINES = 2
_BYTE_ORDER_MARK = "\ufeff"


class NoMatch(Exception):
    """No text matches, or several do. The message is shown to the model."""


@dataclass(frozen=True, slots=True)
class Edited:
    """A file after an edit. `how` is exact, white space or indentation."""

    text: str
    how: str
    replacements: int = 1


def replace_text(text: str, old: str, new: str, *, all_of_them: bool, exact: bool) -> Edited:
    """`text` with `old` replaced by `new`. NoMatch when `old` matches nowhere, or more than once
    without `all_of_them`. `exact`: white space must match too.
    """
    if not old:
        raise NoMatch("old is empty, wanted the text to replace; write_file makes a whole file")
    count = text.count(old)
    if count == 1 or (count and all_of_them):
        return Edited(_replace_exact(text, old, new), "exact", count)
    if count > 1:
        starts = itertools.islice(_places(text, old), 8)
        lines = ", ".join(str(text.count("\n", 0, start) + 1) for start in starts)
        raise NoMatch(
            f"old occurs {count} times (lines {lines}), wanted once: give more lines around it"
        )
    if not exact and not all_of_them:
        mark = text[: text.startswith(_BYTE_ORDER_MARK)]
        text = text.removeprefix(mark)
        for how, found in (
            ("white space", _match_lines(text, old, str.rstrip)),
            ("indentation", _match_lines(text, old, str.strip)),
        ):
            if len(found) > 1:
                starts = ", ".join(str(start + 1) for start in found[:8])
                raise NoMatch(f"old matches at lines {starts} but for {how}, wanted once")
            if found:
                edited = _splice(text, old, new, found[0], how)
                if edited is not None:
                    return Edited(mark + edited, how)
    raise NoMatch(f"old does not occur{_closest(text, old)}")


def _places(text: str, old: str) -> Iterator[int]:
    position = text.find(old)
    while position >= 0:
        yield position
        position = text.find(old, position + len(old))


def _old_lines(old: str) -> list[str]:
    lines = old.replace("\r\n", "\n").split("\n")
    return lines[:-1] if len(lines) > 1 and lines[-1] == "" else lines


def _match_lines(text: str, old: str, normal) -> list[int]:  # noqa: ANN001
    """Indices of the lines where `old` begins when both are compared through `normal`."""
    wanted = [normal(line) for line in _old_lines(old)]
    if not any(line.strip() for line in wanted):
        return []
    lines = [normal(line) for line in split_lines(text)]
    last = len(lines) - len(wanted)
    return [start for start in range(last + 1) if lines[start : start + len(wanted)] == wanted]


def _splice(text: str, old: str, new: str, start: int, how: str) -> str | None:
    """The file with the matched lines replaced. None when the indentation shifts unevenly."""
    lines, wanted = split_lines(text), _old_lines(old)
    fresh = [line.removesuffix("\r") for line in _old_lines(new)] if new else []
    behind = lines[start + len(wanted) :]
    replaced = lines[start : start + len(wanted)]
    shift = _shift(wanted, replaced) if how == "indentation" else ("", "")
    if shift is None:
        return None
    ends = _ends(lines, start, len(wanted))
    put: list[str] = []
    for line, (source, is_kept) in zip(fresh, _sources(wanted, fresh), strict=True):
        content = _content(replaced[source]) if is_kept else _indent_by(line, *shift)
        if content is None:
            return None
        put += [content, ends[source]]
    if put and not behind and not text.endswith("\n"):
        put.pop()  # the file ends as it did
    return "".join([*lines[:start], *put, *behind])


def _replace_exact(text: str, old: str, new: str) -> str:
    """Every `old` replaced. Additional lines of `new` get the file's kind of line ends."""
    if "\r\n" not in text or "\r" in old + new:
        return text.replace(old, new)
    lines, wanted, fresh = split_lines(text), old.split("\n"), new.split("\n")
    sources = list(_sources(wanted, fresh))[:-1]
    parts: list[str] = []
    done, row = 0, 0
    for place in _places(text, old):
        row += text.count("\n", done, place)
        ends = _ends(lines, row, len(wanted))
        put = [part + ends[source] for part, (source, _) in zip(fresh, sources, strict=False)]
        # a newline that begins `old` includes its carriage return
        start = place - (not wanted[0] and text.endswith("\r", done, place))
        parts += [text[done:start], *put, fresh[-1]]
        row, done = row + old.count("\n"), place + len(old)
    return "".join([*parts, text[done:]])


def _sources(old: list[str], new: list[str]) -> Iterator[tuple[int, bool]]:
    """The old line that each new line replaces or follows, and whether it repeats that one."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, start, end, first, last in matcher.get_opcodes():
        for offset in range(last - first):
            yield min(start + offset, max(end - 1, 0)), tag == "equal"


def _ends(lines: list[str], start: int, count: int) -> list[str]:
    """Line ends of the lines. A last line of the file without one gets that of the line before it."""
    ended = [line for line in lines[max(start - 1, 0) : start + count] if line.endswith("\n")]
    found = [line[len(_content(line)) :] for line in ended]
    missing = count - len(found) + min(start, 1)
    return [*found, *missing * (found[-1:] or ["\n"])][min(start, 1) :]


def _content(line: str) -> str:
    """A line without its end. A carriage return alone ends no line."""
    return line.removesuffix("\n").removesuffix("\r") if line.endswith("\n") else line


def _shift(old: list[str], found: list[str]) -> tuple[str, str] | None:
    """Indentation removed and added at every line. None when that differs between lines."""
    shifts: set[tuple[str, str]] = set()
    for before, after in zip(old, found, strict=True):
        if not before.strip():
            continue
        was, now = indent_of(before), indent_of(after)
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


def indent_of(line: str) -> str:
    """White space at the beginning of a line."""
    return line[: len(line) - len(line.lstrip())]


def _closest(text: str, old: str) -> str:
    """The lines most like `old`, with line numbers, as the end of a sentence."""
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
