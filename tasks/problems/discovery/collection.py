"""A project's own rules of what a test is: the settings of pytest that decide it, as a file beside its code.

Other settings are left behind: plug-ins, coverage, warnings and selections do not change what the tests are.
"""

import configparser
import posixpath
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ostinato.infra.platform.bounded_files import parse_toml
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.inside.sources import NAMES, RULES_FILE

_IMPORT_MODES = ("--import-mode=append", "--import-mode=importlib")
# pytest takes them from the first of these that has its table: (file, table)
_PLACES = (
    ("pytest.toml", "pytest"), (".pytest.toml", "pytest"), ("pytest.ini", "pytest"), (".pytest.ini", "pytest"),
    ("pyproject.toml", "tool"), ("tox.ini", "pytest"), ("setup.cfg", "tool:pytest"),
)  # fmt: skip


class Rules(Record):
    """Settings of pytest that decide what the tests of a project are, as words. Those not stated are left out."""

    python_files: tuple[str, ...] = ()
    pythonpath: tuple[str, ...] = Field(default=(), description="folders below the project's own")
    addopts: tuple[str, ...] = Field(default=(), description="the import mode alone")
    others: dict[str, tuple[str, ...]] = Field(default={})


def read_rules(files: Mapping[str, bytes]) -> Rules:
    """The rules that a project's files state, in the one that pytest itself would take."""
    found = (_read(files, *place) for place in _PLACES)
    told = next((settings for settings in found if settings is not None), {})
    words = {name: tuple(_split(value)) for name, value in told.items()}
    paths = map(posixpath.normpath, words.pop("pythonpath", ()))
    options = " ".join(words.get("addopts", ())).replace("--import-mode ", "--import-mode=").split()
    return Rules(
        python_files=words.get("python_files", ()),
        pythonpath=tuple(path for path in paths if path[0] not in "./"),
        addopts=tuple(option for option in options if option in _IMPORT_MODES),
        others={name: words[name] for name in NAMES if name in words},
    )


def write_rules(rules: Rules, stripped_prefix: str) -> dict[str, str]:
    """The rules as the file that every run of the tests reads, by its path. Empty where they are pytest's own."""
    inside = f"{stripped_prefix}/" if stripped_prefix else ""
    paths = [f"{path}/".removeprefix(inside).rstrip("/") or "." for path in rules.pythonpath]
    told = {
        **rules.others,
        "addopts": rules.addopts,
        "pythonpath": paths if {*paths} - {"."} else (),
    }
    lines = [f"{name} = {shlex.join(words)}" for name, words in sorted(told.items()) if words]
    return {RULES_FILE: "\n".join(["[pytest]", *lines, ""])} if lines else {}


def _read(files: Mapping[str, bytes], name: str, section: str) -> dict[str, Any] | None:
    """Settings of one file. None where pytest would look at the next: what does not parse holds none."""
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


def _split(value: Any) -> list[str]:
    """Words of a setting, which is a text or a list of texts."""
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    try:
        return shlex.split(str(value))
    except ValueError:  # a quotation that does not end
        return str(value).split()
