"""The fenced blocks of the guides, and the commands of those that a shell reads."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.source import ROOT

GUIDES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md", "examples/README.md"),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
NO_GUIDES = {
    "docs/lab-log.md": "what was run once, with the names of its day",
    "docs/gateway-api.md": "generated; tests/architecture/test_documents.py compares it",
    "docs/recipe-reference.md": "generated; tests/architecture/test_documents.py compares it",
}
PLACEHOLDERS = {
    "DIR": "out",
    "HEAD": "127.0.0.1",
    "HOST": "host.example",
    "ID": "reinforced-1a2b3c",
    "KEY_ID": "key",
    "MY_ENVIRONMENT": "my-environment",
    "MY_KEY": "MY_KEY",
    "NAME": "small",
    "NODE": "127.0.0.1",
    "OPTIONS": "--set learning.world_size=4 --set learning.layout.tensor=4",
    "PASSWORD": "password",
    "PATH": "code/shop",
    "PUBLIC_KEY": "0" * 64,
    "REFERENCE": "checkpoint/smollm2@1",
    "REPOSITORY": "https://host.example/ostinato.git",
    "REPOSITORY_URL": "https://host.example/ostinato.git",
    "SUFFIX": "abcde",
}
"""What a reader writes for the words in capitals, in a folder that holds a repository in code/shop."""
FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})(.*)$")
CAPITALS = re.compile(r"(?<![\w$./-])[A-Z][A-Z_]+(?![\w=])|(?<=//)[A-Z][A-Z_]+(?=/)")
VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
PUNCTUATION = re.compile(r"[();<>|&]+")


@dataclass(frozen=True)
class Block:
    """A fenced block of a guide."""

    file: str
    line: int
    language: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        """File and first line, which stay when lines above are added."""
        return self.file, self.text.partition("\n")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a shell block: the program and its arguments, and the variables set for it."""

    block: Block
    variables: Mapping[str, str]
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """Name of the program. Empty when only variables are set."""
        return Path(self.words[0]).name if self.words else ""

    def __str__(self) -> str:
        return " ".join((self.program, *self.words[1:]))


def list_blocks() -> list[Block]:
    """Every block of every guide."""
    return [block for file in GUIDES if file not in NO_GUIDES for block in _blocks_of(file)]


def _blocks_of(file: str) -> Iterator[Block]:
    opened: tuple[int, str, str, str] | None = None
    inside: list[str] = []
    for number, line in enumerate((ROOT / file).read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, inside = (number, fence[1], fence[2], fence[3].strip()), []
        elif opened and fence and fence[2].startswith(opened[2]) and not fence[3]:
            yield Block(file, opened[0], opened[3], "\n".join(inside))
            opened = None
        elif opened:
            inside.append(line.removeprefix(opened[1]))
    assert opened is None, f"{file}: the block at line {opened and opened[0]} does not end"


def read_commands(block: Block) -> list[Command]:
    """The commands of a shell block, also those in pipes, substitutions and parentheses."""
    found: list[Command] = []
    for tokens in _logical_lines(block):
        words: list[str] = []
        is_target = False  # of a redirection
        for token in (*tokens, ";"):
            if PUNCTUATION.fullmatch(token):
                found += _command(block, words)
                words, is_target = [], token[0] in "<>"
            elif is_target:
                is_target = False
            else:
                words.append(token)
    return found


def _command(block: Block, words: Sequence[str]) -> Iterator[Command]:
    rest = list(words)
    is_export = rest[:1] == ["export"]
    if is_export:
        rest.pop(0)
    variables: dict[str, str] = {}
    while rest and (assigned := VARIABLE.fullmatch(rest[0])):
        variables[assigned[1]] = assigned[2]
        rest.pop(0)
    assert not (is_export and rest), f"{block}: export of {rest[0]!r}, wanted NAME=value"
    if variables or rest:
        yield Command(block, variables, tuple(rest))


def _logical_lines(block: Block) -> Iterator[list[str]]:
    """Words of each line. One that ends in a backslash or within quotes goes on in the next."""
    pending = ""
    for line in block.text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            tokens = list(lexer)
        except ValueError:
            pending += "\n"
            continue
        yield tokens
        pending = ""
    assert not pending, f"{block}: quotes are not closed"


def fill(words: Sequence[str], values: Mapping[str, str] = PLACEHOLDERS) -> list[str]:
    """The words as a reader types them. An unknown word in capitals fails."""
    filled: list[str] = []
    for word in words:
        unknown = set(CAPITALS.findall(word)) - values.keys()
        assert not unknown, f"{word!r} holds {sorted(unknown)}, wanted placeholders of the table"
        made = CAPITALS.sub(lambda found: values[found[0]], word)
        filled += made.split() if word == "OPTIONS" else [made]
    return filled
