"""The gateway of this machine over a checkpoint: the place where gateway, engine, boxes and problems' repositories meet."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.gateway.config import GatewayConfig, TenantConfig
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys
from ostinato.infra.serving.gateway.server import serve
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
from ostinato.tasks.problems.published import load_repositories
from ostinato.tasks.realtime.records import DeployedModel

FOLLOW_SECONDS = 5.0
PEOPLE_TENANT = "local"


def plan_of(served: DeployedModel) -> ServingPlan:
    """The champion, and the candidate of an open canary."""
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
    """The gateway and its own tenant, beside those with issued keys, for the length of the block. Belongs to one event loop."""
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
            lookup_entries=0,  # an answer's speed must not tell what other users were told
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
    """Serves what `newest` names on the gateway's port and follows it, until cancelled."""
    keys = IssuedKeys(settings.home)
    async with open_local_gateway(newest(), settings, PEOPLE_TENANT, keys) as (gateway, _):
        following = asyncio.create_task(
            follow_plan(gateway, lambda: plan_of(newest()), poll_seconds=FOLLOW_SECONDS)
        )
        try:
            await serve(gateway.app, settings.host, settings.gateway_port)
        finally:
            following.cancel()
