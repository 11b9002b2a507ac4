"""Regions of files: shown by read_file, changed by line edits.

A `Region` holds lines of a file as last read, and the edits to them. Edits always apply to the text as read, so a
second edit replaces the first.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ostinato.models.rendering.vocabulary import line_tag

_LINE_ITEM = re.compile(r"<L(\d+)>")
_LINES = re.compile(r"^(.*?):(\d+)(?:-(\d+))?$")
_OPENING = re.compile(r"\s*(?:async\s+def|def|class)\s+(\w+)")


class RegionError(Exception):
    """A region that does not exist was named. The message is shown to the model."""


@dataclass(frozen=True, slots=True)
class Region:
    """Lines `first_line` .. of a file as read, with the rest of the file around them."""

    path: str
    before: tuple[str, ...]
    lines: tuple[str, ...]
    after: tuple[str, ...]
    edits: dict[int, str | None] = field(default_factory=dict)  # 1-based; None deletes the line

    @property
    def first_line(self) -> int:
        """1-based line of the file where the region starts."""
        return len(self.before) + 1

    def current_lines(self) -> list[tuple[int, str]]:
        """The region's lines after the edits, each with the number of the line it came from."""
        current: list[tuple[int, str]] = []
        for number, line in enumerate(self.lines, start=1):
            text = self.edits.get(number, line)
            if text is not None:
                if number in self.edits and "\r" not in text:
                    text = self._with_returns(number, text)
                current.extend((number, part) for part in text.split("\n"))
        return current

    def _with_returns(self, number: int, text: str) -> str:
        """New lines with the line end of the line that they replace, or of the one before the file's last line."""
        is_last = number == len(self.lines) and not self.after
        before = (*self.before, *self.lines[: number - 1])
        ending = before[-1:] if is_last else self.lines[number - 1 : number]
        if not ending or not ending[0].endswith("\r"):
            return text
        return text.replace("\n", "\r\n") + ("" if is_last else "\r")

    def text(self) -> str:
        """The whole file with the edits applied."""
        middle = [line for _, line in self.current_lines()]
        return "\n".join([*self.before, *middle, *self.after])

    def number_at(self, file_line: int) -> int | None:
        """The region's line number for a line of the edited file. None outside."""
        index = file_line - self.first_line
        current = self.current_lines()
        return current[index][0] if 0 <= index < len(current) else None

    def with_edits(self, items: str) -> "Region":
        """The region with `<Ln>text` items in place of any earlier edits."""
        return replace(self, edits=parse_line_items(items, len(self.lines)))


def parse_line_items(items: str, num_lines: int) -> dict[int, str | None]:
    """`<L2>text<L5>text` as {2: text, 5: text}. A line end before the next item is dropped.

    An item with no text at all deletes its line.
    """
    pieces = _LINE_ITEM.split(items)
    if pieces[0].strip() or len(pieces) == 1:
        raise RegionError("wanted <Ln> in front of each line")
    edits: dict[int, str | None] = {}
    for digits, text in zip(pieces[1::2], pieces[2::2], strict=True):
        number = int(digits)
        if not 1 <= number <= num_lines:
            raise RegionError(f"no line {number}, the region has {num_lines}")
        if number in edits:
            raise RegionError(f"line {number} is given twice")
        edits[number] = text.removesuffix("\n") if text else None
    return edits


def open_region(text: str, argument: str) -> Region:
    """The region that a read_file argument names: `file`, `file::symbol` or `file:first-last`."""
    path, symbol, span = split_argument(argument)
    lines = text.split("\n")
    # A newline at the end of the file starts no further line.
    num_lines = len(lines) - 1 if lines[-1] == "" and len(lines) > 1 else len(lines)
    first, last = 1, num_lines
    if symbol:
        first, last = find_symbol(lines, symbol)
    elif span:
        first, last = span[0], min(span[1], num_lines)
        if not 1 <= first <= last:
            raise RegionError(f"no lines {span[0]}-{span[1]}, {path} has {num_lines}")
    return Region(
        path, tuple(lines[: first - 1]), tuple(lines[first - 1 : last]), tuple(lines[last:])
    )


def split_argument(argument: str) -> tuple[str, str, tuple[int, int] | None]:
    """Path, symbol ("" for none) and line span (None for none) of a read_file argument."""
    path, _, symbol = argument.partition("::")
    span = None
    if not symbol and (match := _LINES.match(argument)):
        path = match.group(1)
        span = (int(match.group(2)), int(match.group(3) or match.group(2)))
    return path.strip().removeprefix("./"), symbol.strip(), span


def find_symbol(lines: list[str], symbol: str) -> tuple[int, int]:
    """First and last line (1-based) of a function, class or Class.method, decorators included.

    Reads indentation only, so it also works on a file that does not parse.
    """
    start, end = 0, len(lines)
    for name in symbol.split("."):
        pattern = re.compile(rf"\s*(?:async\s+def|def|class)\s+{re.escape(name)}\b")
        matches = [index for index in range(start, end) if pattern.match(lines[index])]
        if not matches:
            raise RegionError(f"no function or class {symbol}")
        found = min(matches, key=lambda index: _indent(lines[index]))
        end = _block_end(lines, found, end)
        start = found
    return _with_decorators(lines, start), end


def definition_at(lines: list[str], number: int) -> tuple[int, int]:
    """First and last line (1-based) of the definition that opens at a line, decorators included."""
    return _with_decorators(lines, number - 1), _block_end(lines, number - 1, len(lines))


def _with_decorators(lines: Sequence[str], start: int) -> int:
    """The line (1-based) of the first decorator of the definition that opens at an index."""
    while start > 0 and lines[start - 1].lstrip().startswith("@"):
        start -= 1
    return start + 1


def name_at(lines: Sequence[str], number: int) -> str:
    """The function or class around line `number` (1-based), decorators included. Empty outside of any."""
    index = min(number, len(lines)) - 1
    if lines[index].lstrip().startswith("@"):
        below = range(index, len(lines))
        index = next((later for later in below if _OPENING.match(lines[later])), index)
    names: list[str] = []
    limit = _indent(lines[index]) + 1
    for line in reversed(lines[: index + 1]):
        if not line.strip() or _indent(line) >= limit or line.lstrip()[0] in ")]}":
            continue
        limit = _indent(line)
        if opening := _OPENING.match(line):
            names.append(opening.group(1))
    return ".".join(reversed(names))


def _block_end(lines: list[str], start: int, limit: int) -> int:
    """Index after the last non-blank line of the block that opens at `start`."""
    indent = _indent(lines[start])
    end = start + 1
    for index in range(start + 1, limit):
        line = lines[index]
        if not line.strip():
            continue
        if _indent(line) <= indent and line.lstrip()[0] not in ")]}":
            break
        end = index + 1
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def show_lines(region: Region, limit_lines: int) -> tuple[str, Region]:
    """The view of a region (at most `limit_lines`) and the region cut to the lines shown."""
    hidden = len(region.lines) - limit_lines
    if hidden > 0:
        shown = region.lines[:limit_lines]
        rest = region.lines[limit_lines:] + region.after
        region = Region(region.path, region.before, shown, rest)
    view = "\n".join(line_tag(index) + line for index, line in enumerate(region.lines, start=1))
    if hidden > 0:
        following = region.first_line + limit_lines
        view += f"\n{hidden} more lines from {region.path}:{following}"
    return view, region
