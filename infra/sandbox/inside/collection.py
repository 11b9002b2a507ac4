"""A repository's own rules of what a test is, as options of pytest. Standard library only: it is read in boxes too.

The rules are an ini file of pytest at the repository's top, which `problems from` writes. A run takes the named
settings out of it and nothing else, since all of them give their own ini file.
"""

import configparser
import fnmatch
import os
import shlex

RULES_FILE = "pytest.ini"
NAMES = (
    "python_classes", "python_functions", "pythonpath", "usefixtures", "consider_namespace_packages",
)  # fmt: skip
_SECTION = "pytest"


def read_options(root: str) -> list[str]:
    """Options for a run of the repository whose files lie at `root`."""
    try:
        with open(os.path.join(root, RULES_FILE), encoding="utf-8", errors="replace") as file:
            return make_options(root, file.read())
    except FileNotFoundError:
        return []


def make_options(root: str, rules: str) -> list[str]:
    """Options for a run of the repository at `root` by the text of its rules, which may be empty."""
    told = _read(rules)
    paths = [os.path.join(root, path) for path in shlex.split(told.get("pythonpath", ""))]
    told = {**told, "pythonpath": shlex.join(paths)} if paths else told
    options = [f"--override-ini={name}={told[name]}" for name in NAMES if told.get(name)]
    mode = [word for word in told.get("addopts", "").split() if word.startswith("--import-mode=")]
    return options + mode


def is_test_name(name: str, rules: str = "") -> bool:
    """Whether pytest takes a function of that name for a test, in a class of unittest or elsewhere."""
    patterns = ["test", *shlex.split(_read(rules).get("python_functions", ""))]
    return any(name.startswith(item) or fnmatch.fnmatch(name, item) for item in patterns)


def _read(rules: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(rules)
    except configparser.Error:
        return {}
    return dict(parser[_SECTION]) if _SECTION in parser else {}
