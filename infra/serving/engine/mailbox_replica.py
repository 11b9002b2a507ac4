"""Engine replicas that take requests and hand out answers in batches, and their start as Ray actors.

Clients reach them through `fleet`, which loads no engine.
"""

import asyncio
import itertools
from collections.abc import Sequence
from time import monotonic

from ray.actor import ActorHandle

from ostinato.infra.platform.cluster.actors import get_or_create_actor, live_nodes
from ostinato.infra.platform.cluster.mailbox import Outbox
from ostinato.infra.platform.errors import EngineError, OstinatoError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.mailbox import GATHER_SECONDS, Answer
from ostinato.infra.serving.engine.replica import EngineReplica
from ostinato.models.decode.config import EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.spec import ModelSpec

_MAX_CONCURRENCY = 1000  # coroutines of one replica: waiting requests cost nothing
_RESTARTS = 5
_GONE_SECONDS = 3600.0  # a client that says nothing for this long is gone


class MailboxReplica(EngineReplica):
    """A replica with a mailbox for each client."""

    def __init__(
        self,
        replica_id: str,
        spec: ModelSpec,
        config: EngineConfig,
        chain: tuple[ObjectStore, str] | None = None,
    ) -> None:
        super().__init__(replica_id, spec, config, chain)
        self._outboxes: dict[str, Outbox[Answer]] = {}
        self._heard_at: dict[str, float] = {}  # by client
        self._answering: dict[str, asyncio.Task[None]] = {}

    async def post(
        self,
        client_id: str,
        requests: Sequence[GenerateRequest],
        ended_sessions: Sequence[str],
        cancelled: Sequence[str] = (),
    ) -> None:
        """Takes requests, stops cancelled ones and lets ended sessions go. Returns at once."""
        outbox = self._outbox(client_id)
        for request in requests:
            name = request.request_id
            task = self._answering[name] = asyncio.create_task(self._answer(request, outbox))
            task.add_done_callback(lambda _, name=name: self._answering.pop(name, None))
        for request_id in cancelled:
            if request_id in self._answering:
                self._answering[request_id].cancel()
        for session_id in ended_sessions:
            await self.end_session(session_id)

    async def collect(self, client_id: str) -> list[Answer]:
        """All answers that are ready. Waits a while for the first."""
        return await self._outbox(client_id).collect()

    async def _answer(self, request: GenerateRequest, outbox: Outbox[Answer]) -> None:
        name = request.request_id
        try:
            outbox.put((name, await self.generate(request), None))
        except (OstinatoError, ValueError) as error:
            outbox.put((name, None, error))
        except Exception as error:  # noqa: BLE001 - supervision: it must reach who asked
            text = f"request {name} failed on replica {self.replica_id}: {error!r}"
            outbox.put((name, None, EngineError(text)))

    def _outbox(self, client_id: str) -> Outbox[Answer]:
        """The client's outbox. Drops those of clients that are gone: one that waits asks every few seconds."""
        now = self._heard_at[client_id] = monotonic()
        for gone in [name for name, at in self._heard_at.items() if now - at > _GONE_SECONDS]:
            del self._outboxes[gone], self._heard_at[gone]
        return self._outboxes.setdefault(client_id, Outbox(GATHER_SECONDS))


def start_replicas(
    spec: ModelSpec,
    config: EngineConfig,
    replica_ids: list[str],
    *,
    num_cpus: float = 1.0,
    chain: tuple[ObjectStore, str] | None = None,
) -> dict[str, ActorHandle]:
    """Starts (or finds) one actor per id, on the machines of the cluster in turn. They serve after `EngineFleet.follow`.

    A replica whose process dies is started again without weights; with `chain` it then applies that
    chain's newest version by itself.
    """
    return {
        replica_id: get_or_create_actor(
            MailboxReplica,
            replica_id,
            replica_id,
            spec,
            config,
            chain,
            num_cpus=num_cpus,
            num_gpus=config.gpus_per_replica,
            max_restarts=_RESTARTS,
            max_concurrency=_MAX_CONCURRENCY,
            on_node=node,
            is_movable=True,
        )
        for replica_id, node in zip(replica_ids, itertools.cycle(live_nodes()), strict=False)
    }
