"""Problems as tasks of Harbor, one folder each, with image, text, tests and solution.

`environment/` holds the broken repository and a Dockerfile on an image of the Python version that proved the
problem. `tests/` holds the pristine test files and a script that runs the named tests and writes the reward.
`solution/` holds the patch.
"""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from ostinato.infra.platform.diffs import unified_diff
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.folders import write_folder
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.records import Problem

SCHEMA_VERSION = "1.4"
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_DOCKERFILE = f"""FROM docker.io/library/python:{_VERSION}
RUN pip install --no-cache-dir pytest=={{pytest}}
WORKDIR /app
COPY repository /app
"""
_TEST = """#!/bin/bash
# The tests as they are, whatever became of those in the project, then the verdict.
cd /app && cp -r /tests/. /app/ && rm /app/test.sh
if python -m pytest -q -p no:cacheprovider {tests}; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
_SOLVE = """#!/bin/bash
cd /app && git apply --whitespace=nowarn /solution/gold.patch
"""


def write_task(
    problem: Problem, repository: PreparedRepository, directory: Path, pytest_version: str
) -> Path:
    """Writes the problem's task to a new folder below `directory`, and returns the folder. ConfigError if the folder
    exists, ProblemError for a problem that is not judged by tests.
    """
    if problem.environment or problem.reply is not None:
        judge = f"the environment {problem.environment}" if problem.environment else "its reply"
        raise ProblemError(
            f"problem {problem.problem_id} is judged by {judge}, wanted a "
            "problem that is judged by tests, as tasks of Harbor are"
        )
    if problem.old_place is not None:
        raise ProblemError(
            f"problem {problem.problem_id} is a refactoring, wanted another kind: a task's tests cannot tell whether the "
            "old name is gone"
        )
    target = directory / problem.problem_id
    if target.exists():
        raise ConfigError(f"{target} exists, wanted a new folder")
    files = dict(repository.files)
    broken = problem.break_files(files)
    product = sorted(path for path in broken if not repository.is_test(path))
    tests = {path: content for path, content in files.items() if repository.is_test(path)}
    named = " ".join(map(shlex.quote, (*problem.fail_to_pass, *problem.pass_to_pass)))
    if "test.sh" in tests:
        raise ProblemError(
            f"problem {problem.problem_id} has a test file test.sh, a name that Harbor reserves"
        )
    written = {
        "task.toml": _describe(problem, repository, files),
        "instruction.md": f"{problem.prompt}\n",
        "environment/Dockerfile": _DOCKERFILE.format(pytest=pytest_version),
        "tests/test.sh": _TEST.format(tests=named),
        "solution/solve.sh": _SOLVE,
        "solution/gold.patch": solution_patch({path: broken[path] for path in product}, files),
    }
    write_folder(target, {path: text.encode() for path, text in written.items()})
    write_folder(target / "environment/repository", {**files, **broken})
    write_folder(target / "tests", tests)
    for script in ("tests/test.sh", "solution/solve.sh"):
        (target / script).chmod(0o755)
    return target


def solution_patch(broken: Mapping[str, bytes], files: Mapping[str, bytes]) -> str:
    """The patch for `git apply` that turns the broken files into the original ones."""
    return "".join(unified_diff(path, broken[path], files[path]) for path in broken)


def _describe(problem: Problem, repository: PreparedRepository, files: Mapping[str, bytes]) -> str:
    roots = (*repository.package_paths, *repository.test_paths)
    tops = {path.partition("/")[0] for path in files}
    kept = sorted(tops - {root.partition("/")[0] for root in roots})
    task = {
        "schema_version": SCHEMA_VERSION,
        "task": {
            "name": f"ostinato/{problem.problem_id}",
            "description": f"{problem.kind} in {problem.repository}",
            "keywords": ["python", problem.kind],
        },
        "metadata": {
            "category": "software-engineering",
            "split": problem.split.value,
            "ostinato": {
                "problem_id": problem.problem_id,
                "repository_fingerprint": problem.repository_fingerprint,
                "package": problem.repository,
                "fail_to_pass": list(problem.fail_to_pass),
                "pass_to_pass": list(problem.pass_to_pass),
                "layout": {
                    "stripped_prefix": "",
                    "package_paths": list(repository.package_paths),
                    "test_paths": list(repository.test_paths),
                    "kept_paths": kept,
                },
            },
        },
        "verifier": {"timeout_sec": 300.0},
        "agent": {"timeout_sec": 1800.0},
        "environment": {"build_timeout_sec": 600.0, "network_mode": "no-network"},
    }
    return tomli_w.dumps(task)
