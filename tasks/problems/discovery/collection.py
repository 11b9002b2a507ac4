"""A project's own rules of what a test is: the settings of pytest that decide it, as a file beside its code.

Other settings are left behind: plug-ins, coverage, warnings and selections do not change what the tests are.
"""

import configparser
import posixpath
import shlex
import tomllib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.inside.collection import NAMES, RULES_FILE

# pytest takes them from the first of these that has its table: (file, table)
_PLACES = (
    ("pytest.toml", "pytest"), (".pytest.toml", "pytest"), ("pytest.ini", "pytest"), (".pytest.ini", "pytest"),
    ("pyproject.toml", "tool"), ("tox.ini", "pytest"), ("setup.cfg", "tool:pytest"),
)  # fmt: skip
_DEFAULTS = {"python_functions": ["test"], "python_classes": ["Test"]}


class Rules(Record):
    """Settings of pytest that decide what the tests of a project are. Empty where they are pytest's own."""

    python_files: tuple[str, ...] = ()
    pythonpath: tuple[str, ...] = ()
    """folders below the project's own, not the project's itself"""
    import_mode: str = ""
    others: dict[str, str] = Field(default={}, description="name -> value, as in an ini file")


def read_rules(files: Mapping[str, bytes]) -> Rules:
    """The rules that a project's files state, from the file that pytest itself would take."""
    found = (_read(files, *place) for place in _PLACES)
    told = next((settings for settings in found if settings is not None), {})
    words = {name: _split(value) for name, value in told.items()}
    paths = [posixpath.normpath(path) for path in words.get("pythonpath", ())]
    mode = ""
    for option, following in pairwise([*words.get("addopts", []), ""]):
        name, _, value = option.partition("=")
        mode = (value or following) if name == "--import-mode" else mode
    return Rules(
        python_files=tuple(words.get("python_files", ())),
        pythonpath=tuple(
            path for path in paths if path != "." and not path.startswith(("/", ".."))
        ),
        import_mode=mode if mode in ("append", "importlib") else "",
        others={
            name: shlex.join(value)
            for name, value in words.items()
            if name in NAMES and name != "pythonpath" and value != _DEFAULTS.get(name)
        },
    )


def write_rules(rules: Rules, stripped_prefix: str) -> dict[str, str]:
    """The rules as the file that every run of the tests reads, by its path. Empty where they are pytest's own."""
    lines = [f"{name} = {value}" for name, value in sorted(rules.others.items())]
    inside = f"{stripped_prefix}/" if stripped_prefix else ""
    paths = [f"{path}/".removeprefix(inside).rstrip("/") for path in rules.pythonpath]
    if any(paths):
        lines.append(f"pythonpath = {shlex.join(path or '.' for path in paths)}")
    if rules.import_mode:
        lines.append(f"addopts = --import-mode={rules.import_mode}")
    return {RULES_FILE: "\n".join(["[pytest]", *lines, ""])} if lines else {}


def _read(files: Mapping[str, bytes], name: str, section: str) -> dict[str, Any] | None:
    """Settings of one file. None where pytest would look at the next: what does not parse holds none."""
    if name not in files:
        return None
    text, is_own = files[name].decode(errors="replace"), "pytest." in name
    try:
        if name.endswith(".toml"):
            table = tomllib.loads(text).get(section)
            table = (table or {}).get("pytest") if section == "tool" else table
            table = (table or {}).get("ini_options", table)
            return {} if table is None and is_own else table
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        parser.read_string(text)
    except (configparser.Error, tomllib.TOMLDecodeError):
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
