"""Dependencies of a gateway."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.gateway.answers.workplaces import RepositoryWorkplaces
from ostinato.infra.serving.gateway.arms import ArmTable
from ostinato.infra.serving.gateway.config import GatewayConfig
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys
from ostinato.infra.serving.gateway.uploads.store import Uploads
from ostinato.models.rendering import Renderer


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """Everything that a gateway uses. `arms` may change while it serves."""

    config: GatewayConfig
    arms: ArmTable
    renderer: Renderer
    workplaces: RepositoryWorkplaces
    ledger: Ledger
    objects: ObjectStore
    uploads: Uploads
    issued_keys: IssuedKeys | None = None
    wall_clock: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
