"""Regular expression search over the files of a box, with the ripgrep that every box has.

It searches all regular files except those below caches and .git and those that contain NUL bytes. Links
are not followed.
"""

import shlex
from dataclasses import dataclass
from typing import NamedTuple

_HIDDEN_FOLDERS = (".git", "__pycache__", ".venv", "node_modules")
_PROBED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TextSearch:
    """Parameters of one text search."""

    pattern: str
    path: str = "."
    glob: str = ""  # .gitignore pattern, also with {a,b}, of files to search; empty: all
    ignores_case: bool = False
    counts_only: bool = False


class TextMatch(NamedTuple):
    """One matching line, or a file with the number of its matching lines and no text."""

    path: str
    number: int
    text: str


def search_command(search: TextSearch) -> str:
    """A shell command for the search. Exit code 0: found, 1: nothing, 2: error.

    A NUL byte follows each path in the output. ripgrep searches a file named on its command line even if
    it is binary, so the command looks for NUL bytes first.
    """
    path = shlex.quote(search.path or ".")
    flags = "--no-config --no-ignore --hidden --encoding none --color never --no-heading"
    globs = [f"-g {shlex.quote(search.glob)}"] if search.glob else []
    globs += [f"-g {shlex.quote(f'!{name}')}" for name in _HIDDEN_FOLDERS]
    command = " ".join(
        (
            f"rg {flags} --with-filename --null --sort path {'-c' if search.counts_only else '-n'}",
            *globs,
            *(("-i",) if search.ignores_case else ()),
            f"-e {shlex.quote(search.pattern)} -- {path}",
        )
    )
    zeros = f"$(head -c {_PROBED_BYTES} -- {path} | tr -dc '\\000' | wc -c)"
    return f'if [ -f {path} ] && [ "{zeros}" -gt 0 ]; then (exit 1); else {command}; fi'


def read_matches(output: bytes) -> tuple[list[TextMatch], str]:
    """Matches, and the other lines of the output (errors and notes on binary files)."""
    found: list[TextMatch] = []
    other: list[str] = []
    for line in output.decode(errors="replace").split("\n"):
        path, zero, rest = line.partition("\0")
        number, _, text = rest.partition(":")
        if zero and number.isdecimal():
            found.append(TextMatch(path.removeprefix("./"), int(number), text))
        elif line.strip():
            other.append(line)
    return found, "\n".join(other)
