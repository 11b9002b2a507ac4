"""Regular expressions over the files of a box, by the ripgrep that every box has.

All regular files are searched but those below caches and .git and those that contain NUL bytes; links
are not followed.
"""

import shlex
from dataclasses import dataclass
from typing import NamedTuple

_HIDDEN_FOLDERS = (".git", "__pycache__", ".venv", "node_modules")
_PROBED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TextSearch:
    """One text search."""

    pattern: str
    path: str = "."
    glob: str = ""  # only files that match, as in .gitignore with {a,b}; empty: all
    ignores_case: bool = False
    counts_only: bool = False


class TextMatch(NamedTuple):
    """One matching line, or how many lines of a file match (then without text)."""

    path: str
    number: int
    text: str


def search_command(search: TextSearch) -> str:
    """A shell command for the search. Exit code 0: found, 1: nothing, 2: error.

    A NUL byte follows each path in the output. ripgrep searches a file that is named to it even when
    that is binary, so the command looks for NUL bytes first.
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
    """Matches, and what else was said (errors, notes on files that are not text)."""
    found: list[TextMatch] = []
    said: list[str] = []
    for line in output.decode(errors="replace").split("\n"):
        path, zero, rest = line.partition("\0")
        number, _, text = rest.partition(":")
        if zero and number.isdecimal():
            found.append(TextMatch(path.removeprefix("./"), int(number), text))
        elif line.strip():
            said.append(line)
    return found, "\n".join(said)
