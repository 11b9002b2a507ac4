"""Questions to pip: the newest version of a package, what it needs, and how pip is configured."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Sequence

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.syntax import evaluate_literal

_SECONDS = 300


def newest_version(name: str) -> str:
    """The newest release of a package. ConfigError when the index has none."""
    said = _pip("index", "versions", name)
    found = re.match(r"\S+ \(([^)]+)\)", said)
    if found is None:
        raise ConfigError(f"package {name!r}: pip tells no version: {said[:200]!r}")
    return found[1]


def pin(requirements: Sequence[str]) -> tuple[str, ...]:
    """The requirements and all they depend on as name==version, from wheels alone: nothing is built.
    ConfigError with pip's message when there is no such set.
    """
    if not requirements:
        return ()
    report = _pip(
        *("install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary", ":all:"),
        *("--report", "-", *requirements),
    )
    found = [item["metadata"] for item in json.loads(report)["install"]]
    return tuple(sorted(f"{item['name'].lower()}=={item['version']}" for item in found))


def read_pip_settings() -> dict[str, str]:
    """pip's options by name, out of its files and the environment as they count for `pip download`."""
    found = {"default-timeout": "15"}
    told = [
        re.match(r"([^=]+)\.([\w-]+)=(.*)", line) for line in _pip("config", "list").splitlines()
    ]
    for section in ("global", "download", ":env:"):  # later ones override earlier ones
        found |= {m[2]: str(evaluate_literal(m[3])) for m in told if m and m[1] == section}
    return found


@functools.cache
def default_index() -> str:
    """The index that pip takes where its settings name none: distributions of Python and mirrors change it."""
    return _run("-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)").strip()


def _pip(*arguments: str) -> str:
    return _run("-m", "pip", *arguments, "--disable-pip-version-check")


def _run(*arguments: str) -> str:
    command, asked = [sys.executable, "-P", *arguments], " ".join(arguments[2:3]) or "default index"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip {asked} did not end in {_SECONDS} s") from error
    if done.returncode != 0:
        raise ConfigError(f"pip {asked}: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout
