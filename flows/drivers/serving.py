"""Builds the gateway over a checkpoint: the place where gateway, engine, boxes and promotion meet.

Owns the tenants of a local installation and the shape of the served engine. Enters: a checkpoint directory, problems.
Leaves: an application and what must be closed after it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from flows.drivers.problem_set import load_problems, load_repositories
from infra.engine.local import LocalEngine
from infra.gateway.app import GatewayContext, build_app
from infra.gateway.arms import CONTROL, Arm, ArmTable
from infra.gateway.config import GatewayConfig, TenantConfig
from infra.gateway.workplaces import RepositoryWorkplaces
from infra.harness.config import HarnessConfig
from infra.ledger import Ledger
from infra.objects import ObjectStore
from infra.settings import Settings
from models.checkpoint import load_checkpoint
from models.decode.engine import CachePolicy, EngineConfig
from models.rendering import Renderer

LOCAL_TENANT = "local"
LOCAL_API_KEY = "ostinato-local"  # of a gateway that listens on this machine only


class ServedModel(BaseModel):
    """What the gateway serves and where agents work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint_directory: str
    checkpoint_id: str = Field(description="name in the ledger's promotions and in recorded interactions")
    weight_version: int = 0
    problems_directory: str = Field(description="its repositories are the ones that users may name")
    harness: HarnessConfig
    engine_slots: int = Field(default=16, ge=1)
    boxes_per_repository: int = Field(default=8, ge=1)
    speculation_depth: int = Field(default=0, ge=0)


@dataclass(frozen=True, slots=True)
class ServedGateway:
    """A running application's parts."""

    app: FastAPI
    engine: LocalEngine
    workplaces: RepositoryWorkplaces


@asynccontextmanager
async def open_gateway(served: ServedModel, settings: Settings) -> AsyncIterator[ServedGateway]:
    """The application for the length of the block; belongs to one event loop."""
    checkpoint = load_checkpoint(Path(served.checkpoint_directory))
    engine = LocalEngine(
        checkpoint.spec,
        checkpoint.weights,
        served.weight_version,
        EngineConfig(
            slots=served.engine_slots,
            cache_policy=CachePolicy.EXACT,
            speculation_depth=served.speculation_depth,
        ),
        name="gateway",
    )
    problems = Path(served.problems_directory)
    names = {problem.repository for problem in load_problems(problems)}
    workplaces = RepositoryWorkplaces(
        load_repositories(problems, names),
        boxes_per_repository=served.boxes_per_repository,
        test_limit_seconds=served.harness.call_time_limit_seconds,
    )
    tenant = TenantConfig(name=LOCAL_TENANT, api_keys=(SecretStr(LOCAL_API_KEY),), consent=True)
    context = GatewayContext(
        config=GatewayConfig(tenants=(tenant,), harness=served.harness),
        arms=ArmTable(Arm(CONTROL, served.checkpoint_id, served.weight_version, engine)),
        renderer=Renderer.load(Path(served.checkpoint_directory)),
        workplaces=workplaces,
        ledger=Ledger(settings.ledger_url).migrate(),
        objects=ObjectStore.from_url(settings.object_store_url),
    )
    try:
        yield ServedGateway(build_app(context), engine, workplaces)
    finally:
        await workplaces.close()
        engine.close()
