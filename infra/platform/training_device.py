"""Chooses the device of a training stage by settings, model and number of ranks, and runs its ranks there."""

import functools
import logging
from collections.abc import Callable
from typing import Literal, TypeVar

from ostinato.infra.platform.cluster.launch import join_stage
from ostinato.infra.platform.cluster.placement import cluster_gpus
from ostinato.infra.platform.cluster.rank_group import run_rank_actors
from ostinato.infra.platform.cluster.ranks import marked_rank
from ostinato.infra.platform.cluster.ray_start import start_ray
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ClusterError, ConfigError, TrainingError, boundary
from ostinato.infra.platform.settings import Settings, load_launch
from ostinato.infra.platform.telemetry import fields
from ostinato.models.device import choose_device, count_gpus
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.training.data_parallel import LostRank, run_rank, run_ranks
from ostinato.models.weight_shapes import num_parameters

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Given = tuple[Request, Workspace]

_logger = logging.getLogger(__name__)


def training_device(
    settings: Settings, spec: ModelSpec, num_ranks: int, num_gpus: int | None = None
) -> Literal["cpu", "cuda"]:
    """The kind of device that all ranks train on. ConfigError when OSTINATO_DEVICE asks for GPUs that are missing.
    `num_gpus`: GPUs of a cluster; None: those of this machine.
    """
    parameters = num_parameters(spec)
    with boundary(ConfigError, "OSTINATO_DEVICE"):
        kind = choose_device(
            settings.device,
            num_parameters=parameters,
            num_ranks=num_ranks,
            num_gpus=count_gpus() if num_gpus is None else num_gpus,
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
    """Rank 0's answer. Ranks are the processes of torchrun if it started this one, else actors of the cluster at
    OSTINATO_RAY_ADDRESS, else processes of this machine. `ostinato status` shows each rank.
    """
    workspace = given[1]
    launch = load_launch()
    if launch is None:
        return run_on_ranks(train_rank, given, spec, layout, stage)
    with boundary(TrainingError, f"{stage} in {workspace.directory}"):
        kind = training_device(workspace.settings, spec, launch.local_world_size)
        store = join_stage(launch, workspace.directory, layout.world_size)
        marked = functools.partial(_train_marked, train_rank)
        return run_rank(marked, given, launch.rank, layout, store, kind)


def run_on_ranks(
    train_rank: Callable[[Given[Request], int], Answer],
    given: Given[Request],
    spec: ModelSpec,
    layout: ParallelLayout,
    stage: str,
) -> Answer:
    """Like `train_on_ranks`, but never on the processes of torchrun."""
    workspace, world_size = given[1], layout.world_size
    settings = workspace.settings
    marked = functools.partial(_train_marked, train_rank)
    with boundary(TrainingError, f"{stage} in {workspace.directory}"):
        if settings.ray_address is not None and world_size > 1:
            start_ray(settings.cpu_limit, settings.object_store_memory_bytes, settings.ray_address)
            kind = training_device(settings, spec, world_size, cluster_gpus())
            return run_rank_actors(marked, given, workspace.directory, layout, kind)
        kind = training_device(settings, spec, world_size)
        try:
            return run_ranks(marked, given, layout, kind)
        except LostRank as error:
            raise ClusterError(f"{stage} in {workspace.directory}: {error}") from error


def _train_marked(
    train_rank: Callable[[Given[Request], int], Answer], given: Given[Request], rank: int
) -> Answer:
    with marked_rank(given[1].directory, rank):
        return train_rank(given, rank)
