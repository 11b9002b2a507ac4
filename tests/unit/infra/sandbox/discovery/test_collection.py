"""Rules of collection: from the file that pytest itself would take, and only what decides what the tests are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.infra.sandbox.discovery.collection import read_rules, unloaded_plugins, write_rules
from ostinato.infra.sandbox.inside.sources import RULES_FILE, is_test_name, make_options

IN_EVERY_FORM = {
    "pytest.toml": "[pytest]\npython_functions = ['NAME_*']\n",
    ".pytest.toml": "[pytest]\npython_functions = ['NAME_*']\n",
    "pytest.ini": "[pytest]\npython_functions = NAME_*\n",
    ".pytest.ini": "[pytest]\npython_functions = NAME_*\n",
    "pyproject.toml": "[tool.pytest.ini_options]\npython_functions = 'NAME_*'\n",
    "tox.ini": "[pytest]\npython_functions = NAME_*\n",
    "setup.cfg": "[tool:pytest]\npython_functions = NAME_*\n",
}


def ask_pytest(folder: Path) -> set[str]:
    """Names of the tests that pytest itself collects in a folder."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    # ours take five seconds to load
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    said = subprocess.run(
        [*command, "--rootdir=."], cwd=folder, env=alone, capture_output=True, text=True
    )
    return {line.partition("::")[2] for line in said.stdout.splitlines() if "::" in line}


def test_the_order_of_the_files_is_that_of_pytest(tmp_path: Path) -> None:
    names = list(IN_EVERY_FORM)
    tests = "".join(f"def n{n}_a():\n    pass\n" for n in range(len(names)))
    (tmp_path / "test_a.py").write_text(tests)
    for first in range(len(names)):
        files = {
            name: IN_EVERY_FORM[name].replace("NAME", f"n{n}").encode()
            for n, name in enumerate(names)
            if n >= first
        }
        for name in names:
            (tmp_path / name).unlink(missing_ok=True)
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        assert read_rules(files).others == {"python_functions": (f"n{first}_*",)}
        assert ask_pytest(tmp_path) == {f"n{first}_a"}


def test_an_empty_file_of_pytest_hides_those_behind_it() -> None:
    behind = {"setup.cfg": b"[tool:pytest]\npython_functions = it_*\n"}
    for name in ("pytest.ini", ".pytest.ini", "pytest.toml"):
        assert read_rules({name: b"", **behind}).others == {}
    for name in ("tox.ini", "pyproject.toml"):
        assert read_rules({name: b"", **behind}).others != {}


@pytest.mark.parametrize(
    "text",
    [
        "addopts = -n auto --cov -p no:such_plugin\nminversion = 99\nrequired_plugins = pytest-gone\nfilterwarnings = error",
        "pythonpath = . src",
        "python_files = check_*.py",
        "addopts = --import-mode prepend 'a quotation",
        "testpaths = tests\nmarkers =\n    slow: takes long",
    ],
)
def test_settings_that_change_no_test_leave_the_repository_as_it_was(text: str) -> None:
    rules = read_rules({"pytest.ini": f"[pytest]\n{text}\n".encode()})
    assert write_rules(rules, "src") == {}


def test_rules_come_back_as_options_of_every_run() -> None:
    text = (
        "[tool.pytest.ini_options]\npython_functions = ['it_*', 'should*']\npython_classes = 'Describe*'\n"
        "pythonpath = ['src', 'tests/lib', '../outside', '/abs']\naddopts = ['-v', '--import-mode', 'importlib']\n"
    )
    written = write_rules(read_rules({"pyproject.toml": text.encode()}), "src")
    options = make_options("/repo", written["pytest.ini"])
    assert options == [
        "--override-ini=python_classes='Describe*'",
        "--override-ini=python_functions='it_*' 'should*'",
        "--override-ini=pythonpath=/repo/. /repo/tests/lib",
        "--import-mode=importlib",
    ]
    names = ("it_adds", "should_add", "test_adds", "add")
    assert [is_test_name(name, written["pytest.ini"]) for name in names] == [
        True,
        True,
        True,
        False,
    ]
    assert make_options("/repo", "") == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("-p shop.fixtures", ("shop.fixtures",)),
        ("-q -pshop_plugin --strict-markers -p pytester", ("shop_plugin", "pytester")),
        ("-p no:cacheprovider -pno:randomly --pdbcls=a:b --import-mode=importlib", ()),
        ("", ()),
    ],
)
@pytest.mark.parametrize("name", IN_EVERY_FORM)
def test_plugins_that_addopts_loads_are_named(
    options: str, named: tuple[str, ...], name: str
) -> None:
    toml = name.endswith(".toml")
    for value in (repr(options), repr(options.split())) if toml else (options,):
        text = IN_EVERY_FORM[name].partition("\n")[0] + f"\naddopts = {value}\n"
        told = unloaded_plugins({name: text.encode(), RULES_FILE: b"[pytest]\npythonpath = src\n"})
        if name != RULES_FILE:  # of an upload, the last is our own
            assert told.partition(": ")[2].partition(";")[0] == ", ".join(named)
    assert unloaded_plugins({name: b"\xff[", "a.py": b"-p shop"}) == ""
