"""A gateway over a small random model, in a process of its own: prints its address and serves until
it is ended. Argument: a directory for everything it writes.
"""

import asyncio
import sys
from pathlib import Path

from pydantic import SecretStr

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.gateway.config import GatewayConfig, RateLimitConfig, TenantConfig
from ostinato.infra.serving.gateway.server import running_server
from ostinato.infra.serving.gateway.serving import ServedCheckpoint, ServingPlan, open_gateway
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.decode.engine import EngineConfig
from tests.fakes.tiny_model import TINY, random_weights
from tests.fakes.toy_gateway import make_renderer, toy_repository, toy_uploads


async def main(directory: Path) -> None:
    renderer = make_renderer()
    spec = TINY.model_copy(update={"vocab_size": renderer.vocab_size, "max_sequence_tokens": 160})
    tokenizer = renderer.save(directory / "tokenizer")
    place = directory / "checkpoint"
    save_checkpoint(place, spec, random_weights(spec, seed=1), tokenizer_path=tokenizer)
    often = RateLimitConfig(requests_per_minute=60_000, burst_requests=10_000)
    tenants = (
        TenantConfig(name="people", api_keys=(SecretStr("key-of-people"),), rate_limit=often),
        TenantConfig(name="rude", api_keys=(SecretStr("key-of-rude"),)),
    )
    harness = HarnessConfig(context_tokens=128, max_generated_tokens=24)
    async with (
        open_gateway(
            ServingPlan(ServedCheckpoint("nano@1", place, 1)),
            [toy_repository(directory)],
            GatewayConfig(line="people", tenants=tenants, harness=harness),
            ledger=Ledger(f"sqlite:///{directory}/ledger.db").migrate(),
            objects=ObjectStore.from_url(f"file://{directory}/objects"),
            engine=EngineConfig(slots=32),
            uploads=toy_uploads(directory),
        ) as gateway,
        running_server(gateway.app, "127.0.0.1", 0) as url,
    ):
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
