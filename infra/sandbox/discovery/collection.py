"""A project's own collection rules: the settings of pytest that decide what a test is, as a file next to its code.

Other settings are dropped, because plug-ins, coverage, warnings and selections do not change what the tests are.
"""

import configparser
import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from ostinato.infra.platform.bounded_files import parse_toml
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.inside.sources import NAMES, RULES_FILE

_IMPORT_MODES = ("--import-mode=append", "--import-mode=importlib")
# `-p no:NAME` unloads a plug-in
_PLUGIN = re.compile(r"(?:^|\s)-p\s*(?!no:)([A-Za-z_][\w.]*)")
# pytest reads its settings from the first of these files that has the table: (file, table)
_PLACES = (
    ("pytest.toml", "pytest"), (".pytest.toml", "pytest"), ("pytest.ini", "pytest"), (".pytest.ini", "pytest"),
    ("pyproject.toml", "tool"), ("tox.ini", "pytest"), ("setup.cfg", "tool:pytest"),
)  # fmt: skip


class Rules(Record):
    """Settings of pytest, as words, that decide what the tests of a project are. Settings not stated are empty."""

    python_files: tuple[str, ...] = ()
    testpaths: tuple[str, ...] = Field(default=(), description="folders below the project's own")
    pythonpath: tuple[str, ...] = Field(default=(), description="folders below the project's own")
    addopts: tuple[str, ...] = Field(default=(), description="option of the import mode only")
    others: dict[str, tuple[str, ...]] = Field(default={})


def read_rules(files: Mapping[str, bytes]) -> Rules:
    """The rules in the project's file that pytest itself would read."""
    found = (_read(files, *place) for place in _PLACES)
    stated = next((settings for settings in found if settings is not None), {})
    words = {name: tuple(_split(value)) for name, value in stated.items()}
    options = " ".join(words.get("addopts", ())).replace("--import-mode ", "--import-mode=").split()
    return Rules(
        python_files=words.get("python_files", ()),
        testpaths=_inside(words.get("testpaths", ())),
        pythonpath=_inside(words.get("pythonpath", ())),
        addopts=tuple(option for option in options if option in _IMPORT_MODES),
        others={name: words[name] for name in NAMES if name in words and name != "pythonpath"},
    )


def unloaded_plugins(files: Mapping[str, bytes]) -> str:
    """A remark on plug-ins that the project's pytest settings load by `-p`. Empty: there are none."""
    names: dict[str, None] = {}  # ordered
    for place in _PLACES:
        words = _split((_read(files, *place) or {}).get("addopts", ()))
        text = " ".join(words)
        names |= dict.fromkeys(_PLUGIN.findall(text))
    if not names:
        return ""
    return (
        f"plug-ins that addopts loads by -p are not loaded in boxes: {', '.join(names)}; tests that need their "
        "fixtures fail, unless a conftest.py imports the fixtures"
    )


def write_rules(rules: Rules, stripped_prefix: str) -> dict[str, str]:
    """The rules as the file, by path, that every run of the tests reads. Empty if they are pytest's defaults."""
    inside = f"{stripped_prefix}/" if stripped_prefix else ""
    paths = [f"{path}/".removeprefix(inside).rstrip("/") or "." for path in rules.pythonpath]
    settings = {
        **rules.others,
        "addopts": rules.addopts,
        "pythonpath": paths if {*paths} - {"."} else (),
    }
    lines = [f"{name} = {shlex.join(words)}" for name, words in sorted(settings.items()) if words]
    return {RULES_FILE: "\n".join(["[pytest]", *lines, ""])} if lines else {}


def _read(files: Mapping[str, bytes], name: str, section: str) -> dict[str, Any] | None:
    """Settings of one file. None if pytest would read the next file, or this one does not parse."""
    if name not in files:
        return None
    is_own = "pytest." in name
    try:
        if name.endswith(".toml"):
            table = parse_toml(name, files[name]).get(section)
            table = (table or {}).get("pytest") if section == "tool" else table
            table = (table or {}).get("ini_options", table)
            return {} if table is None and is_own else table
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        parser.read_string(files[name].decode(errors="replace"))
    except (configparser.Error, ConfigError):
        return None
    if section in parser:
        return dict(parser[section])
    return {} if is_own else None


def _inside(paths: Iterable[str]) -> tuple[str, ...]:
    """The paths below the project's folder."""
    return tuple(path for path in map(posixpath.normpath, paths) if path[0] not in "./")


def _split(value: Any) -> list[str]:
    """Words of a setting, which is a string or a list of strings."""
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    try:
        return shlex.split(str(value))
    except ValueError:  # a quotation mark without its partner
        return str(value).split()
