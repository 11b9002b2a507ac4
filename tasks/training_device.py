"""The device of a stage that trains: this installation's setting, met with the model and its ranks."""

import functools
import logging
from collections.abc import Callable
from typing import Literal, TypeVar

from ostinato.infra.platform.cluster.ranks import marked_rank
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, TrainingError, boundary
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import fields
from ostinato.models.device import choose_device, count_gpus
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.training.data_parallel import run_ranks

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Given = tuple[Request, Workspace]

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


def train_on_ranks(
    train_rank: Callable[[Given[Request], int], Answer],
    given: Given[Request],
    spec: ModelSpec,
    layout: ParallelLayout,
    stage: str,
) -> Answer:
    """Rank 0's answer. Each rank's process is known to `ostinato status`."""
    workspace = given[1]
    kind = training_device(workspace.settings, spec, layout.world_size)
    marked = functools.partial(_train_marked, train_rank)
    with boundary(TrainingError, f"{stage} in {workspace.directory}"):
        return run_ranks(marked, given, layout, workspace.directory, kind)


def _train_marked(
    train_rank: Callable[[Given[Request], int], Answer], given: Given[Request], rank: int
) -> Answer:
    with marked_rank(given[1].directory, rank):
        return train_rank(given, rank)
