"""README and guides: their size, and that the paths, commands and decisions they name exist."""

import functools
import itertools
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from ostinato.flows import cli
from ostinato.flows.operating import local_prefect
from ostinato.flows.recipe import recipe_names
from tests.architecture.source import ROOT, count_lines, list_files, list_functions

README_LINES = 120
README_COLUMNS = 120
PAGE_LINES = {"AGENTS.md": 60, "ARCHITECTURE.md": 120}
DECISIONS_MAXIMUM = 30
# the lab log and old decisions may name what is gone
GUIDES = [
    name
    for name in list_files()
    if name.endswith(".md")
    and (name.count("/") == 0 or re.fullmatch(r"(docs|infra|kernels|examples)/.*", name))
    and not name.startswith("docs/decisions/")
    and name not in ("CHANGELOG.md", "DECISIONS.md", "docs/lab-log.md")
]
LINKED = [
    name
    for name in list_files()
    if name.endswith(".md") and not name.startswith(("tests/", "models/"))
]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
TOPS = r"(?:flows|tasks|infra|models|kernels|tests|docs|examples|\.ci|\.github)"
PATH = re.compile(rf"(?<![\w./-])({TOPS}/[\w./-]*[\w/])|`([\w-]+\.(?:md|toml|txt|yaml))`")
COMMAND = re.compile(r"(?:^|[`\s/])ostinato ((?:[\w.-]+)(?: [^`#\n|]*)?)", re.MULTILINE)
MODULE = re.compile(r"python -m ((?:ostinato|tests)\.[\w.]+)")
TARGET = re.compile(r"(?:^|`)make ([a-z]+)", re.MULTILINE)
STATUS = re.compile(r"accepted|rejected|superseded by (\d{4})")


def _text(name: str) -> str:
    return (ROOT / name).read_text()


def _code(name: str) -> str:
    """Code of a document: fenced blocks and spans in backticks, one per line."""
    blocks = re.findall(r"```\w*\n(.*?)```", _text(name), re.DOTALL)
    prose = re.sub(r"```.*?```", "", _text(name), flags=re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`[^`\n]+`", prose)])


def test_readme_keeps_its_budget() -> None:
    lines = _text("README.md").splitlines()

    assert len(lines) <= README_LINES
    assert [line for line in lines if len(line) > README_COLUMNS] == []


@pytest.mark.parametrize("name", PAGE_LINES)
def test_pages_that_are_read_whole_keep_their_budget(name: str) -> None:
    assert len(_text(name).splitlines()) <= PAGE_LINES[name]


@pytest.mark.parametrize("name", LINKED)
def test_relative_links_lead_somewhere(name: str) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", _text(name), flags=re.DOTALL)
    links = [link for link in LINK.findall(prose) if not link.startswith(("http", "mailto:"))]

    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("name", GUIDES)
def test_paths_named_exist(name: str) -> None:
    folders = (ROOT, (ROOT / name).parent, ROOT / "docs")
    named = {
        top or file
        for top, file in PATH.findall(_text(name))
        if not re.search("NAME|NNNN|STAGE", top)
    }

    assert [
        path
        for path in sorted(named)
        if not any(folder.joinpath(path).exists() for folder in folders)
    ] == []


@pytest.mark.parametrize("name", GUIDES)
def test_commands_named_exist(name: str) -> None:
    commands = COMMAND.findall(_code(name))

    assert [found for line in commands if (found := _unknown_part(line.split()))] == []
    for module in MODULE.findall(_code(name)):
        path = Path(module.removeprefix("ostinato.").replace(".", "/"))
        assert (ROOT / path.with_suffix(".py")).is_file(), module
    targets = set(re.findall(r"^([a-z]+):", _text("Makefile"), re.MULTILINE))
    assert set(TARGET.findall(_code(name))) <= targets


@functools.cache
def _program() -> Any:
    """The command line."""
    return typer.main.get_command(cli.app)


def _unknown_part(words: list[str]) -> str:
    """The first word that the command line does not know; empty when it knows all."""
    command = _program()
    rest = list(words)
    while isinstance(command, TyperGroup) and rest:
        if rest[0] == "--help":
            return ""
        known = command.commands.get(rest[0])
        if known is None:
            return " ".join(words)
        command, rest = known, rest[1:]
    if command.context_settings.get("ignore_unknown_options"):
        return ""
    options = set(itertools.chain(*(parameter.opts for parameter in command.params))) | {"--help"}
    unknown = [word for word in rest if word.startswith("--") and word.split("=")[0] not in options]
    if words[0] == "run" and rest and not rest[0].startswith("-") and rest[0] != "FLOW":
        unknown += [] if rest[0].replace("-", "_") in local_prefect.flow_names() else [rest[0]]
    return " ".join([words[0], *unknown]) if unknown else ""


def test_index_of_decisions_agrees_with_the_files() -> None:
    listed = re.findall(
        r"^\| \[(\d{4})\]\((\S+)\) \| (.+) \| (.+) \|$", _text("DECISIONS.md"), re.M
    )
    files = sorted(name for name in list_files() if name.startswith("docs/decisions/"))

    assert sorted(path for _, path, _, _ in listed) == files
    assert len(files) <= DECISIONS_MAXIMUM
    numbers = [number for number, *_ in listed]
    assert numbers == [f"{number:04d}" for number in range(1, len(numbers) + 1)]
    for number, path, title, status in listed:
        head = _text(path).splitlines()
        assert head[0] == f"# {number}. {title}"
        assert head[2].strip() == f"Status: {status}"
        assert head[3].startswith("Date: 20")
        match = STATUS.match(status)
        assert match, f"{path}: status {status!r}, wanted {STATUS.pattern}"
        assert match[1] is None or match[1] in numbers


def test_recipe_reference_is_current() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "recipe_reference.py"))
    assert _text("docs/recipe-reference.md") == generator["recipe_reference"](), (
        "stale: run `make docs`"
    )


def test_gateway_reference_is_current() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "gateway_reference.py"))
    assert _text("docs/gateway-api.md") == generator["gateway_reference"](), (
        "stale: run `make docs`"
    )


def test_the_table_of_recipes_names_those_that_ship() -> None:
    table = _text("docs/recipes.md").partition("## Shipped recipes")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]

    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == recipe_names()


def test_numbers_of_lines_that_guides_state_are_right() -> None:
    """Of the loss, to which a first reader is sent, and of the examples, which people copy."""
    loss = re.search(r"`(tasks/\S+\.py)`, `(\w+)`, (\d+) lines", _text("CONTRIBUTING.md"))
    assert loss is not None
    lengths = {(item.path, item.name): item.lines for item in list_functions()}
    assert int(loss[3]) == lengths[loss[1], loss[2]]

    examples = re.search(r"packages \((\d+) to (\d+) lines\)", _text("docs/extending.md"))
    assert examples is not None
    modules = [name for name in list_files() if re.fullmatch(r"examples/\w+/\w+\.py", name)]
    counts = [count_lines(name) for name in modules]
    assert [int(number) for number in examples.groups()] == [min(counts), max(counts)]
