"""Lines that match a regular expression, for boxes without ripgrep.

The walk and the output (`path`, a zero byte, line number or count, text), which are ripgrep's:
folders in the order of names, no links, no caches, no file with a zero byte in its first 64 KiB.
Expressions are Python's; what both languages share means the same in both. Standard library only:
this file runs inside the box.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator

HIDDEN_FOLDERS = (".git", "__pycache__", ".venv", "node_modules")
PROBED_BYTES = 1 << 16


def main(arguments: list[str]) -> int:
    """Exit code 0: found, 1: nothing, 2: the expression or the path is wrong."""
    counts_only, flags, globs, pattern = False, 0, [], ""
    while arguments[0] != "--":
        option = arguments.pop(0)
        if option == "-c":
            counts_only = True
        elif option == "-i":
            flags = re.IGNORECASE
        elif option == "-g":
            globs.append(re.compile(glob_expression(_letters(arguments.pop(0)))))
        else:
            pattern = arguments.pop(0)
    start = arguments[1]
    try:
        expression = re.compile(pattern, flags)
    except re.error as error:
        sys.stderr.write(f"grep: {pattern}: {error}\n")
        return 2
    if not os.path.exists(start):
        sys.stderr.write(f"grep: {start}: no such file or folder\n")
        return 2
    found = 1
    for path in files_below(start):
        inside = _letters(os.path.relpath(path, "."))
        if globs and path != start and not any(glob.fullmatch(inside) for glob in globs):
            continue
        matches = matching_lines(path, expression)
        if matches:
            found = 0
        told = [f"{number}:{line}" for number, line in matches]
        if matches and counts_only:
            told = [str(len(matches))]
        for text in told:
            sys.stdout.buffer.write(os.fsencode(f"{path}\0{text}\n"))
    return found


def files_below(start: str) -> Iterator[str]:
    """Regular files in the order of their paths; `start` itself where it is a file."""
    if not os.path.isdir(start):
        yield start
        return
    try:
        names = sorted(os.listdir(start), key=os.fsencode)
    except OSError as error:
        sys.stderr.write(f"grep: {start}: {error.strerror}\n")
        return
    for name in names:
        path = os.path.join(start, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode) and name not in HIDDEN_FOLDERS:
            yield from files_below(path)
        elif stat.S_ISREG(mode) and name not in HIDDEN_FOLDERS:
            yield path


def matching_lines(path: str, expression: re.Pattern[str]) -> list[tuple[int, str]]:
    """Numbers and texts of the lines that match; none in a file that is not text."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        sys.stderr.write(f"grep: {path}: {error.strerror}\n")
        return []
    if b"\0" in content[:PROBED_BYTES]:
        return []
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    found = []
    for number, line in enumerate(lines, 1):
        if b"\0" in line:
            break
        text = os.fsdecode(line)
        if expression.search(text):
            found.append((number, text))
    return found


def glob_expression(glob: str) -> str:
    """A .gitignore pattern for files as a regular expression over whole relative paths."""
    is_anchored = "/" in glob
    parts = glob.removeprefix("/").split("/")
    text = "" if is_anchored else "(?:.*/)?"
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if part == "**":
            text += ".+" if is_last else "(?:.*/)?"
        else:
            text += _name_expression(part) + ("" if is_last else "/")
    return f"(?s:{text})"


def _letters(name: str) -> str:
    """One letter a byte of a name: what `?` and a class of a glob stand for in ripgrep."""
    return os.fsencode(name).decode("latin-1")


def _name_expression(part: str) -> str:
    text, place = "", 0
    while place < len(part):
        letter = part[place]
        place += 1
        end = part.find("]", place + 1) if letter == "[" else -1
        if letter == "*":
            text += "[^/]*"
        elif letter == "?":
            text += "[^/]"
        elif end > 0:
            inner = part[place:end].replace("\\", "\\\\")
            text += "[" + ("^" + inner[1:] if inner[0] in "!^" else inner) + "]"
            place = end + 1
        else:
            text += re.escape(letter)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
