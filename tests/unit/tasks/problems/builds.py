"""Builds of problem sets over tiny repositories, and the check of their proofs."""

import asyncio
import subprocess
from pathlib import Path

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.settings import Settings
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.problems import run as stage
from ostinato.tasks.problems.config import ProblemsConfig, ProblemsRequest, ProblemsResult
from ostinato.tasks.records import Problem

SKIPPING = b"import pytest\npytest.skip('', allow_module_level=True)\n"


def build_set(
    tmp_path: Path, config: ProblemsConfig, name: str, parallel_runs: int | None = None
) -> tuple[ProblemsResult, list[Problem]]:
    """What the stage makes of a configuration whose archives lie below `tmp_path`."""
    directory = tmp_path / name
    directory.mkdir(exist_ok=True)
    workspace = Workspace.open(directory, Settings(home=tmp_path / "home"))
    archives = tmp_path / "archives"
    request = ProblemsRequest(
        config=config, archives_directory=archives, parallel_runs=parallel_runs
    )
    result = stage.main(request, workspace)
    lines = (directory / "problems" / "problems.jsonl").read_text().splitlines()
    return result, [Problem.model_validate_json(line) for line in lines]


def load(tmp_path: Path, name: str) -> PreparedRepository:
    return PreparedRepository.load(tmp_path / "run" / "problems" / "repositories" / name)


def check_proofs(tmp_path: Path, result: ProblemsResult, problems: list[Problem]) -> None:
    """Gold passes, broken fails exactly the named tests, and cheats get nothing."""
    servers = {name: TestServer(load(tmp_path, name)) for name in result.repositories}
    asyncio.run(_check(servers, problems))


async def _check(servers: dict[str, TestServer], problems: list[Problem]) -> None:
    try:
        for problem in problems:
            server = servers[problem.repository]
            tests = (*problem.fail_to_pass, *problem.pass_to_pass)
            assert (await server.run({}, tests)).passed
            broken = problem.break_files(server.repository.files)
            report = await server.run(broken, tests)
            assert report.passed_ids == set(problem.pass_to_pass), problem.problem_id
            skipping = {path: SKIPPING + text for path, text in broken.items()}
            without_tests = broken | dict.fromkeys(
                path for path in server.repository.files if server.repository.is_test(path)
            )
            assert not (await server.run(skipping, problem.fail_to_pass)).passed_ids
            assert not (await server.run(without_tests, problem.fail_to_pass)).passed_ids
    finally:
        for server in servers.values():
            await server.close()


def begin_history(folder):
    """An empty repository: functions that run git in it, and that commit files."""
    folder.mkdir()

    def git(*arguments):
        identity = ["-c", "user.name=A Person", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)

    def commit(message, files):
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", message)

    git("init", "-q", "-b", "main")
    return git, commit
