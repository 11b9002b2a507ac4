"""Problems as an installable package for verifiers: a module whose `load_environment` opens the set next to it."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.tasks.problems.published import REPOSITORIES_FOLDER, write_problems
from ostinato.tasks.records import Problem

OPENER = "ostinato.tasks.rollout.exported_environment:open_environment"
_MODULE = '''"""Problems of repositories for verifiers: tools run in boxes of ostinato, its grader judges the files."""

from pathlib import Path
from typing import Any

from {module} import {function}


def load_environment(**settings: Any) -> Any:
    """A verifiers environment. `settings`: max_turns, and the fields of `[harness]`."""
    return {function}(Path(__file__).parent / "problems", **settings)
'''


def write_package(problems: Sequence[Problem], source: Path, directory: Path) -> int:
    """Writes the package to a new folder, which gives it its name. Returns the number of problems. `source`: the
    folder of the set. ConfigError if the new folder exists, or its name is not valid for a package.
    """
    name = directory.resolve().name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise ConfigError(
            f"{directory} is named {name!r}, wanted a name of letters, digits, - and _"
        )
    if directory.exists():
        raise ConfigError(f"{directory} exists, wanted a new folder")
    chosen = [item for item in problems if not item.environment and item.reply is None]
    if not chosen:
        raise ProblemError(f"{source} has no problem that tests judge, wanted at least one")
    module = name.replace("-", "_").lower()
    data = directory / module / "problems"
    write_problems(data, chosen)
    for repository in sorted({problem.repository for problem in chosen}):
        place = Path(REPOSITORIES_FOLDER) / repository
        shutil.copytree(source / place, data / place)
    (directory / module / "__init__.py").write_text(
        _MODULE.format(module=OPENER.partition(":")[0], function=OPENER.partition(":")[2])
    )
    described = {
        "build-system": {"requires": ["setuptools>=75"], "build-backend": "setuptools.build_meta"},
        "project": {
            "name": name,
            "version": "0.1.0",
            "description": f"{len(chosen)} problems of repositories, judged by their tests.",
            "dependencies": ["ostinato[verifiers]"],
        },
        "tool": {
            "setuptools": {
                "packages": [module],
                "package-data": {module: ["problems/**/*", "problems/**/.*"]},
            }
        },
    }
    (directory / "pyproject.toml").write_text(tomli_w.dumps(described))
    return len(chosen)
