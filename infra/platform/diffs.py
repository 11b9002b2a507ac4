"""Changes of files as unified diffs."""

import difflib
from collections.abc import Iterable

_NO_NEWLINE = "\\ No newline at end of file\n"


def unified_diff(
    path: str, before: bytes | None, after: bytes | None, context_lines: int = 3
) -> str:
    """One file's change as a patch (None: absent). A file that is not text is only named."""
    try:
        old, new = (before or b"").decode(), (after or b"").decode()
    except UnicodeDecodeError:
        return f"Binary files a/{path} and b/{path} differ\n"
    names = (
        "/dev/null" if before is None else f"a/{path}",
        "/dev/null" if after is None else f"b/{path}",
    )
    lines = difflib.unified_diff(split_lines(old), split_lines(new), *names, n=context_lines)
    return _written(lines)


def count_changed_lines(patch: str) -> int:
    """Changed lines of one file's patch without context: for each hunk the removed or the added lines, whichever
    are more.
    """
    count, removed, added = 0, 0, 0
    for line in patch.split("\n")[2:]:  # below the two header lines
        if line.startswith("@@"):
            count, removed, added = count + max(removed, added), 0, 0
        removed += line.startswith("-")
        added += line.startswith("+")
    return count + max(removed, added)


def changed_lines(before: str, after: str, context_lines: int = 1) -> list[str]:
    """The hunks of a text's change without header or newlines. Carriage returns stay in the lines."""
    lines = difflib.unified_diff(split_lines(before), split_lines(after), n=context_lines)
    return _written(lines).split("\n")[2:-1]


def split_lines(text: str) -> list[str]:
    """Lines with their line ends. Only a newline ends a line, as in git, grep and the tools that read files."""
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _written(lines: Iterable[str]) -> str:
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in lines)
