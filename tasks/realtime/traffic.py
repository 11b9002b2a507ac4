"""Child entry of simulated traffic: a gateway on a free port, and simulated users that use it over HTTP.

People's traffic does not use it, but the gateway that `ostinato up` runs.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2

from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import open_lines, read_lines
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.infra.serving.gateway.config import SIMULATED_TENANT, GatewayConfig, TenantConfig
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys
from ostinato.infra.serving.gateway.server import running_server, serve
from ostinato.infra.serving.gateway.serving import (
    OpenGateway,
    ServedCheckpoint,
    ServingPlan,
    follow_plan,
    open_gateway,
)
from ostinato.infra.serving.gateway.tenants import local_tenants
from ostinato.infra.serving.gateway.uploads.expiry import uploads_folder
from ostinato.infra.serving.gateway.uploads.store import UploadStore
from ostinato.models.decode.config import configure_engine
from ostinato.models.decode.engine import CachePolicy
from ostinato.tasks.problems.published import load_problems, load_repositories
from ostinato.tasks.realtime.feedback.simulated_users import (
    SimulatedRequest,
    SimulatedUsersReport,
    UserProblem,
    simulate_users,
)
from ostinato.tasks.realtime.records import DeployedModel, TrafficRequest
from ostinato.tasks.records import Problem, Split

FOLLOW_SECONDS = 5.0
PEOPLE_TENANT = "local"


def plan_of(served: DeployedModel) -> ServingPlan:
    """Plan with the champion and, if a canary is open, its candidate."""
    control = ServedCheckpoint(
        served.checkpoint_id, Path(served.checkpoint_directory), served.weight_version
    )
    if served.candidate is None:
        return ServingPlan(control)
    directory = Path(served.candidate.checkpoint_directory)
    candidate = ServedCheckpoint(served.candidate.checkpoint_id, directory, served.weight_version)
    return ServingPlan(control, candidate, served.candidate.share)


@asynccontextmanager
async def open_local_gateway(
    served: DeployedModel,
    settings: Settings,
    tenant_name: str,
    issued_keys: IssuedKeys | None = None,
) -> AsyncIterator[tuple[OpenGateway, TenantConfig]]:
    """A gateway and its own tenant for the length of the block, in addition to tenants with issued keys. Belongs to one
    event loop.
    """
    tenant = local_tenants(settings.home, (tenant_name,))[tenant_name]
    async with open_gateway(
        plan_of(served),
        list(load_repositories(Path(served.problems_directory)).values()),
        GatewayConfig(line=served.line, tenants=(tenant,), harness=served.harness),
        ledger=Ledger(settings.ledger_url).migrate(),
        objects=open_object_store(settings),
        engine=configure_engine(
            served.decoding,
            slots=served.engine_slots,
            cache_policy=CachePolicy.EXACT,
            lookup_entries=0,  # the speed of an answer must not reveal answers to other users
        ),
        boxes_per_repository=served.boxes_per_repository,
        sandbox=served.sandbox,
        search=SearchService.load(served.search_directory),
        issued_keys=issued_keys,
        uploads=UploadStore(
            uploads_folder(settings),
            hours=settings.upload_hours,
            bytes_per_tenant=settings.upload_bytes_per_tenant,
        ),
    ) as gateway:
        yield gateway, tenant


async def serve_people(newest: Callable[[], DeployedModel], settings: Settings) -> None:
    """Serves the model of `newest()` on the gateway's port and applies its changes, until cancelled."""
    keys = IssuedKeys(settings.home)
    async with open_local_gateway(newest(), settings, PEOPLE_TENANT, keys) as (gateway, _):
        follower = asyncio.create_task(
            follow_plan(gateway, lambda: plan_of(newest()), poll_seconds=FOLLOW_SECONDS)
        )
        try:
            await serve(gateway.app, settings.host, settings.gateway_port)
        finally:
            follower.cancel()


logger = logging.getLogger(__name__)


def main(request: TrafficRequest, workspace: Workspace) -> SimulatedUsersReport:
    """Serves the model until all simulated users are done."""
    return asyncio.run(_run(request, workspace))


async def _run(request: TrafficRequest, workspace: Workspace) -> SimulatedUsersReport:
    directory = Path(request.served.problems_directory)
    problems = [item for item in load_problems(directory, Split.USER) if item.reply is None]
    repositories = load_repositories(directory)
    wanted = request.users.users * request.users.requests_per_user
    first = request.cycle_number * wanted % max(1, len(problems))
    user_problems = [
        UserProblem(problem=problem, files=_broken_files(problem, repositories[problem.repository]))
        for problem in (problems[first:] + problems[:first])[:wanted]
    ]
    servers = {name: TestServer(repository) for name, repository in repositories.items()}
    journal = workspace.directory / "requests.jsonl"
    # the request of a killed run's incomplete last line is repeated
    settled = [SimulatedRequest.model_validate(row) for row in read_lines(journal)]
    total = len(user_problems)

    def on_request(request: SimulatedRequest) -> None:
        settled.append(request)
        with open_lines(journal) as file:
            file.write(request.model_dump_json().encode() + b"\n")
        workspace.progress.update(len(settled), total, f"simulated users: {request.outcome}")

    try:
        async with (
            open_local_gateway(request.served, workspace.settings, SIMULATED_TENANT) as (
                gateway,
                tenant,
            ),
            running_server(gateway.app, workspace.settings.host, 0) as url,
            httpx2.AsyncClient(
                base_url=url,
                headers={"Authorization": f"Bearer {tenant.api_keys[0].get_secret_value()}"},
            ) as client,
        ):
            report = await simulate_users(
                client,
                user_problems,
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


def _broken_files(problem: Problem, repository: PreparedRepository) -> dict[str, str]:
    return {
        path: content.decode() for path, content in problem.break_files(repository.files).items()
    }


def _judge(servers: dict[str, TestServer]) -> Callable[[Problem, dict[str, str]], Awaitable[bool]]:
    """Function that runs the users' tests in their own boxes."""

    async def judge(problem: Problem, files: dict[str, str]) -> bool:
        tests = (*problem.fail_to_pass, *problem.pass_to_pass)
        content = {path: text.encode() for path, text in files.items()}
        return (await servers[problem.repository].run(content, tests, 20.0)).passed

    return judge
