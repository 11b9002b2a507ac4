"""The device of a stage that trains: this installation's setting, met with the model and its ranks."""

import logging
from typing import Literal

from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import fields
from ostinato.models.device import choose_device, count_gpus
from ostinato.models.spec import ModelSpec

_logger = logging.getLogger(__name__)


def training_device(settings: Settings, spec: ModelSpec, num_ranks: int) -> Literal["cpu", "cuda"]:
    """The kind of device that all ranks train on. ConfigError where OSTINATO_DEVICE asks for GPUs that this
    machine has not.
    """
    parameters = spec.num_parameters()
    with boundary(ConfigError, "OSTINATO_DEVICE"):
        kind = choose_device(
            settings.device,
            num_parameters=parameters,
            num_ranks=num_ranks,
            num_gpus=count_gpus(),
        )
    chosen = fields(device=kind, wanted=settings.device, parameters=parameters, ranks=num_ranks)
    _logger.info("trains on %s", chosen)
    return kind
