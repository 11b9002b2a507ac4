"""The gateway of this machine over a checkpoint: the place where gateway, engine, boxes and problems' repositories meet.

Owns what is served and the shape of the served engine. Enters: a checkpoint directory, a problem set. Leaves: a gateway that is
ready to be listened with, and the API key of a local tenant.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from flows.drivers.problem_set import load_problems, load_repositories
from infra.engine.decoding import DecodingConfig
from infra.engine.local import configure_engine
from infra.gateway.config import GatewayConfig, TenantConfig
from infra.gateway.keys import local_tenants
from infra.gateway.serving import OpenGateway, ServedCheckpoint, ServingPlan, open_gateway
from infra.harness.config import HarnessConfig
from infra.ledger import Ledger
from infra.objects import ObjectStore
from infra.settings import Settings
from models.decode.engine import CachePolicy


class ServedModel(BaseModel):
    """What the gateway serves and where agents work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint_directory: str
    checkpoint_id: str = Field(
        description="name in the ledger's promotions and in recorded interactions"
    )
    weight_version: int = 0
    problems_directory: str = Field(description="its repositories are the ones that users may name")
    harness: HarnessConfig
    engine_slots: int = Field(default=16, ge=1)
    boxes_per_repository: int = Field(default=8, ge=1)
    speculation_depth: int = Field(default=0, ge=0)
    decoding: DecodingConfig = DecodingConfig()

    @property
    def plan(self) -> ServingPlan:
        """This checkpoint alone."""
        return ServingPlan(
            ServedCheckpoint(
                self.checkpoint_id, Path(self.checkpoint_directory), self.weight_version
            )
        )


@asynccontextmanager
async def open_local_gateway(
    served: ServedModel, settings: Settings, tenant_name: str
) -> AsyncIterator[tuple[OpenGateway, TenantConfig]]:
    """The gateway and its one tenant for the length of the block; belongs to one event loop."""
    problems = Path(served.problems_directory)
    names = {problem.repository for problem in load_problems(problems)}
    tenant = local_tenants(settings.home, (tenant_name,))[tenant_name]
    async with open_gateway(
        served.plan,
        load_repositories(problems, names),
        GatewayConfig(tenants=(tenant,), harness=served.harness),
        ledger=Ledger(settings.ledger_url).migrate(),
        objects=ObjectStore.from_url(settings.object_store_url),
        engine=configure_engine(
            served.decoding,
            slots=served.engine_slots,
            cache_policy=CachePolicy.EXACT,
            speculation_depth=served.speculation_depth,
            lookup_entries=0,  # an answer's speed must not tell what other users were told
        ),
        boxes_per_repository=served.boxes_per_repository,
    ) as gateway:
        yield gateway, tenant
