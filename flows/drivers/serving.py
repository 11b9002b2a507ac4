"""The gateway of this machine over a checkpoint: the place where gateway, engine, boxes and problems' repositories meet."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.gateway.config import GatewayConfig, TenantConfig
from ostinato.infra.serving.gateway.keys import local_tenants
from ostinato.infra.serving.gateway.serving import (
    OpenGateway,
    ServedCheckpoint,
    ServingPlan,
    open_gateway,
)
from ostinato.models.decode.config import DecodingConfig, configure_engine
from ostinato.models.decode.engine import CachePolicy
from ostinato.tasks.problem_sets import load_problems, load_repositories


class ServedModel(BaseModel):
    """What the gateway serves and where agents work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    line: str = Field(description="serving line that interactions are recorded under")
    checkpoint_directory: str
    checkpoint_id: str = Field(
        description="name in the ledger's promotions and in recorded interactions"
    )
    weight_version: int = 0
    problems_directory: str = Field(description="its repositories are the ones that users may name")
    harness: HarnessConfig
    engine_slots: int = Field(default=16, ge=1)
    boxes_per_repository: int = Field(default=8, ge=1)
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
    ) as gateway:
        yield gateway, tenant
