"""Child entry of simulated traffic: a gateway on a free port and the seeded program that works with it over HTTP.

People's traffic never comes this way: it reaches the gateway that `ostinato up` runs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from pydantic import ValidationError

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.infra.serving.gateway.config import SIMULATED_TENANT
from ostinato.infra.serving.gateway.server import running_server
from ostinato.tasks.problems.published import load_problems, load_repositories
from ostinato.tasks.realtime.feedback.simulated_users import (
    SimulatedRequest,
    SimulatedUsersReport,
    UserProblem,
    simulate_users,
)
from ostinato.tasks.realtime.records import TrafficRequest
from ostinato.tasks.realtime.serving import open_local_gateway
from ostinato.tasks.records import Problem, Split

logger = logging.getLogger(__name__)


def main(request: TrafficRequest, workspace: Workspace) -> SimulatedUsersReport:
    """Serves, lets the users work, ends."""
    return asyncio.run(_run(request, workspace))


async def _run(request: TrafficRequest, workspace: Workspace) -> SimulatedUsersReport:
    directory = Path(request.served.problems_directory)
    problems = load_problems(directory, Split.USER)
    repositories = load_repositories(directory)
    wanted = request.users.users * request.users.requests_per_user
    first = request.cycle_number * wanted % max(1, len(problems))
    mine = (problems[first:] + problems[:first])[:wanted]
    brought = [
        UserProblem(problem=problem, files=_broken_files(problem, repositories[problem.repository]))
        for problem in mine
    ]
    servers = {name: TestServer(repository) for name, repository in repositories.items()}
    journal = workspace.directory / "requests.jsonl"
    settled = _read_settled(journal)
    total = len(brought)

    def on_request(request: SimulatedRequest) -> None:
        settled.append(request)
        with journal.open("a") as file:
            file.write(request.model_dump_json() + "\n")
        workspace.progress.update(len(settled), total, f"simulated users: {request.outcome}")

    try:
        async with (
            open_local_gateway(request.served, workspace.settings, SIMULATED_TENANT) as (
                gateway,
                tenant,
            ),
            running_server(gateway.app, workspace.settings.host, 0) as url,
            httpx.AsyncClient(
                base_url=url,
                headers={"Authorization": f"Bearer {tenant.api_keys[0].get_secret_value()}"},
            ) as client,
        ):
            report = await simulate_users(
                client,
                brought,
                _judge(servers),
                request.users,
                run_name=f"{workspace.directory.parent.name}/{workspace.directory.name}",
                settled=tuple(settled),
                on_request=on_request,
            )
    finally:
        for server in servers.values():
            await server.close()
    logger.info("simulated users are done counts=%s", report.counts)
    return report


def _read_settled(journal: Path) -> list[SimulatedRequest]:
    """Requests settled before a kill. A torn last line is asked again."""
    settled = []
    for line in journal.read_text().splitlines() if journal.is_file() else []:
        try:
            settled.append(SimulatedRequest.model_validate_json(line))
        except ValidationError:
            logger.warning("torn line in %s", journal)
    return settled


def _broken_files(problem: Problem, repository: PreparedRepository) -> dict[str, str]:
    return {
        path: content.decode() for path, content in problem.break_files(repository.files).items()
    }


def _judge(servers: dict[str, TestServer]) -> Callable[[Problem, dict[str, str]], Awaitable[bool]]:
    """The users' own test run, in boxes of theirs."""

    async def judge(problem: Problem, files: dict[str, str]) -> bool:
        tests = (*problem.fail_to_pass, *problem.pass_to_pass)
        content = {path: text.encode() for path, text in files.items()}
        return (await servers[problem.repository].run(content, tests, 20.0)).passed

    return judge
