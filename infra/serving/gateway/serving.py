"""A gateway from checkpoint directories: engines, sandboxes and the application put together.

`ServingPlan` (champion and canary, chosen elsewhere), `ServedModels` (one engine per served
checkpoint), `open_gateway` (all of it for the length of a block) and `follow_plan` (applies changed
plans while it serves).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.platform.errors import ConfigError, OstinatoError, StorageError, boundary
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.serving.engine.start import Engine, start_engine
from ostinato.infra.serving.gateway.answers.workplaces import RepositoryWorkplaces
from ostinato.infra.serving.gateway.app import build_app
from ostinato.infra.serving.gateway.arms import CANDIDATE, CONTROL, Arm, ArmTable
from ostinato.infra.serving.gateway.config import GatewayConfig
from ostinato.infra.serving.gateway.context import GatewayContext
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys
from ostinato.infra.serving.gateway.uploads.store import Uploads, UploadStore
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.decode.engine import EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.rendering import load_renderer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedCheckpoint:
    """A checkpoint that serves users. `weight_version` is recorded with every token it samples."""

    checkpoint_id: str
    directory: Path
    weight_version: int


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """Champion, and a candidate with its share of the sessions."""

    control: ServedCheckpoint
    candidate: ServedCheckpoint | None = None
    share: float = 0.0


class ServedModels:
    """Engines behind the arms. The engine of a removed checkpoint runs on for `drain_seconds`."""

    def __init__(self, engine: EngineConfig, *, context_tokens: int, drain_seconds: float) -> None:
        self._engine_config, self._context_tokens = engine, context_tokens
        self._drain_seconds = drain_seconds
        self._engines: dict[ServedCheckpoint, Engine] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._plan: ServingPlan | None = None

    async def start_arms(self, plan: ServingPlan) -> tuple[Arm, Arm | None, float]:
        """The arms of a plan. Starts the engines that are missing."""
        control = await self._arm(CONTROL, plan.control)
        candidate = (
            await self._arm(CANDIDATE, plan.candidate) if plan.candidate is not None else None
        )
        return control, candidate, plan.share

    async def apply(self, plan: ServingPlan, arms: ArmTable) -> bool:
        """Makes `arms` serve a plan from the next turn on. False when they already serve it."""
        if plan == self._plan:
            return False
        arms.set(*await self.start_arms(plan))
        self._plan = plan
        wanted = {plan.control, plan.candidate}
        for served in [served for served in self._engines if served not in wanted]:
            task = asyncio.create_task(self._retire(self._engines.pop(served)))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        logger.info(
            "serving control=%s candidate=%s share=%s",
            plan.control.checkpoint_id,
            plan.candidate.checkpoint_id if plan.candidate else None,
            plan.share,
        )
        return True

    async def close(self) -> None:
        """Ends every engine now."""
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        for engine in self._engines.values():
            await asyncio.to_thread(engine.close)
        self._engines.clear()

    async def _arm(self, name: str, served: ServedCheckpoint) -> Arm:
        engine = self._engines.get(served)
        if engine is None:
            engine = await asyncio.to_thread(self._start, served)
            self._engines[served] = engine
            await _answer_once(engine)
        return Arm(name, served.checkpoint_id, served.weight_version, engine)

    def _start(self, served: ServedCheckpoint) -> Engine:
        with boundary(StorageError, f"checkpoint {served.checkpoint_id} in {served.directory}"):
            checkpoint = load_checkpoint(served.directory)
        name, spec = served.checkpoint_id, checkpoint.spec
        # the KV cache is allocated for whole contexts, and the harness allows no longer contexts
        longest = min(spec.max_sequence_tokens, self._context_tokens)
        config = self._engine_config.model_copy(update={"max_context_tokens": longest})
        engine = start_engine(spec, checkpoint.weights, served.weight_version, config, name)
        if engine.max_context_tokens < self._context_tokens:
            engine.close()
            raise ConfigError(
                f"harness.context_tokens is {self._context_tokens}, wanted at most the engine's "
                f"{engine.max_context_tokens} for checkpoint {name}"
            )
        return engine

    async def _retire(self, engine: Engine) -> None:
        try:
            await asyncio.sleep(self._drain_seconds)
        finally:
            await asyncio.to_thread(engine.close)


async def _answer_once(engine: Engine) -> None:
    """Samples once, so that the engine loads and compiles everything before users come."""
    request = GenerateRequest(
        request_id="warm-up",
        session_id="warm-up",
        token_ids=(0, 0),
        max_new_tokens=2,
        stop_token_ids=(),
        top_p=0.9,
    )
    await engine.generate(request)
    await engine.end_session(request.session_id)


@dataclass(frozen=True, slots=True)
class OpenGateway:
    """A gateway that is ready to be served."""

    app: FastAPI
    context: GatewayContext
    models: ServedModels


@asynccontextmanager
async def open_gateway(
    plan: ServingPlan,
    repositories: Sequence[PreparedRepository],
    config: GatewayConfig,
    *,
    ledger: Ledger,
    objects: ObjectStore,
    engine: EngineConfig,
    uploads: UploadStore,
    boxes_per_repository: int = 4,
    sandbox: SandboxKind = SandboxKind.NAMESPACE,
    search: SearchService | None = None,
    issued_keys: IssuedKeys | None = None,
) -> AsyncIterator[OpenGateway]:
    """A gateway and everything it needs, closed at the end of the block. The tokenizer is the champion's."""
    harness = config.harness
    models = ServedModels(
        engine,
        context_tokens=harness.context_tokens,
        drain_seconds=harness.attempt_time_limit_seconds,
    )
    uploaded = Uploads(uploads, boxes_per_repository=boxes_per_repository, sandbox=sandbox)
    workplaces = RepositoryWorkplaces(
        repositories,
        boxes_per_repository=boxes_per_repository,
        sandbox=sandbox,
        test_limit_seconds=harness.call_time_limit_seconds,
        search=search,
        uploads=uploaded,
    )
    try:
        with boundary(
            StorageError, f"tokenizer of {plan.control.checkpoint_id} in {plan.control.directory}"
        ):
            renderer = load_renderer(plan.control.directory)
        arms = ArmTable(*await models.start_arms(plan))
        context = GatewayContext(
            config, arms, renderer, workplaces, ledger, objects, uploaded, issued_keys
        )
        await models.apply(plan, arms)
        app = build_app(context)
        async with app.state.gateway.tenants.budgets.shared(context.wall_clock):
            yield OpenGateway(app, context, models)
    finally:
        await models.close()
        await workplaces.close()
        await uploaded.close()


async def follow_plan(
    gateway: OpenGateway, read_plan: Callable[[], ServingPlan], *, poll_seconds: float
) -> None:
    """Applies `read_plan` every `poll_seconds` until cancelled. A plan that cannot be read or loaded changes nothing."""
    while True:
        try:
            plan = await asyncio.to_thread(read_plan)
            await gateway.models.apply(plan, gateway.context.arms)
        except OstinatoError as error:
            logger.warning("serving_plan_unreadable=%s", error)
        await asyncio.sleep(poll_seconds)
