"""Actors of a reinforcement run: trainer, engine replicas, sandbox fleet, rollout and evaluation workers."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.cluster.actors import end_actor
from ostinato.infra.platform.cluster.placement import (
    Placement,
    cluster_gpus,
    release_ranks,
    reserve_ranks,
)
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.training_device import training_device
from ostinato.infra.sandbox.fleet.client import RepositoryFleet
from ostinato.infra.serving.attempts.layers import install_program
from ostinato.infra.serving.engine.fleet import EngineFleet
from ostinato.infra.serving.engine.replica import start_replicas
from ostinato.models.checkpoint import load_spec
from ostinato.models.decode.config import EngineConfig, configure_engine
from ostinato.models.spec import ModelSpec
from ostinato.tasks.problems.published import load_repositories
from ostinato.tasks.reinforcement.learning.actor import TrainerGroup, TrainerStatus
from ostinato.tasks.reinforcement.learning.config import TrainerRequest, trainer_config
from ostinato.tasks.reinforcement.records import STEPS_FOLDER, ReinforcementRequest
from ostinato.tasks.rollout.actor import BuildWorker, RolloutFleet, start_workers
from ostinato.tasks.rollout.config import BOX_LIMITS, WorkerSetup
from ostinato.tasks.rollout.fleet_worker import build_fleet_worker


@dataclass(frozen=True)
class EvaluationServices:
    """An engine replica and a worker that only evaluation uses."""

    engines: EngineFleet
    workers: RolloutFleet


@dataclass(frozen=True)
class RunServices:
    """Handles of a run's actors."""

    trainer: TrainerGroup
    trainer_status: TrainerStatus
    engines: EngineFleet
    workers: RolloutFleet
    evaluation: EvaluationServices | None  # None: the recipe asks for no evaluation


def chain_id_of(request: ReinforcementRequest) -> str:
    return f"chain-{request.run_id}"


@asynccontextmanager
async def open_services(
    request: ReinforcementRequest, workspace: Workspace, objects: ObjectStore
) -> AsyncIterator[RunServices]:
    """Actors of a run. They end with the block."""
    spec = load_spec(Path(request.checkpoint_directory))
    ranks = request.learning.world_size
    device = training_device(workspace.settings, spec, ranks, cluster_gpus())
    placement = await asyncio.to_thread(trainer_placement, ranks, device, workspace.settings)
    trainer_request = TrainerRequest(
        config=trainer_config(request.learning, request.decoding),
        checkpoint_directory=request.checkpoint_directory,
        work_directory=str(workspace.directory / STEPS_FOLDER),
        chain_id=chain_id_of(request),
        device=device,
    )
    starting = asyncio.create_task(
        asyncio.to_thread(_start_trainer, trainer_request, objects, placement)
    )
    replicas = start_replicas(
        spec,
        _engine_config(request, spec),
        [f"{request.run_id}.engine{index}" for index in range(request.engine_replicas)],
        num_cpus=0.0,
        chain=(objects, chain_id_of(request)),
    )
    boxes = await _start_boxes(request)
    workers = RolloutFleet(
        start_workers(
            [f"{request.run_id}.rollouts{index}" for index in range(request.rollout_workers)],
            _worker_builder(request, _rollout_setup(request), replicas),
        ),
        time.time,
    )
    evaluators = _start_evaluation_replica(request)
    evaluation = _evaluation_services(request, evaluators)
    trainer = None
    try:
        trainer, status = await starting
        yield RunServices(trainer, status, EngineFleet(replicas), workers, evaluation)
    finally:
        await workers.close()
        if evaluation is not None:
            await evaluation.workers.close()
        if boxes is not None:
            await boxes.close()
        if trainer is not None:
            trainer.close()
        for actor in (*replicas.values(), *evaluators.values()):
            end_actor(actor)
        if placement is not None:
            release_ranks(placement)


def _start_trainer(
    request: TrainerRequest, objects: ObjectStore, placement: Placement | None
) -> tuple[TrainerGroup, TrainerStatus]:
    """Trainer that has resumed from its newest step checkpoint, with its status."""
    trainer = TrainerGroup(request, objects, placement)
    return trainer, trainer.status()


def trainer_placement(
    world_size: int, device: Literal["cpu", "cuda"], settings: Settings
) -> Placement | None:
    """Bundles for the trainer's ranks. None: a single rank on CPUs, which shares its core with the other actors."""
    if world_size == 1 and device == "cpu":
        return None
    if settings.ray_address is None and world_size > settings.cpu_limit:
        raise ConfigError(
            f"[learning] world_size is {world_size}, wanted at most {settings.cpu_limit}, the cores of this "
            "machine (OSTINATO_CPU_LIMIT), or a cluster (OSTINATO_RAY_ADDRESS)"
        )
    return reserve_ranks(world_size, device)


def _boxes_name(request: ReinforcementRequest) -> str | None:
    return f"{request.run_id}.boxes" if request.rollout.boxes == "fleet" else None


async def _start_boxes(request: ReinforcementRequest) -> RepositoryFleet | None:
    """The run's own sandbox fleet. None: the recipe asks for none."""
    name = _boxes_name(request)
    if name is None:
        return None
    return await RepositoryFleet.start(
        name,
        load_repositories(Path(request.problems_directory)).values(),
        BOX_LIMITS,
        request.rollout.sandbox,
    )


def _start_evaluation_replica(request: ReinforcementRequest) -> dict[str, Any]:
    """Replica for evaluation, by name. It has no chain, so that after a restart by Ray it serves nothing until a
    version is pinned on it.
    """
    if request.evaluation.every_steps is None:
        return {}
    spec = load_spec(Path(request.checkpoint_directory))
    return start_replicas(
        spec,
        _engine_config(request, spec),
        [f"{request.run_id}.evaluation-engine"],
        num_cpus=0.0,
    )


def _engine_config(request: ReinforcementRequest, spec: ModelSpec) -> EngineConfig:
    """Engine settings with the context length that the harness allows. An imported model often allows much more."""
    longest = min(spec.max_sequence_tokens, request.harness.context_tokens)
    return configure_engine(
        request.decoding, slots=request.engine_slots, max_context_tokens=longest
    )


def _evaluation_services(
    request: ReinforcementRequest, replicas: Mapping[str, Any]
) -> EvaluationServices | None:
    if not replicas:
        return None
    setup = _setup(request, request.harness, request.engine_slots)
    build = _worker_builder(request, setup, replicas)
    workers = start_workers([f"{request.run_id}.evaluation-worker"], build)
    return EvaluationServices(EngineFleet(replicas), RolloutFleet(workers, time.time))


def _worker_builder(
    request: ReinforcementRequest, setup: WorkerSetup, replica_names: Iterable[str]
) -> BuildWorker:
    names, boxes = tuple(replica_names), _boxes_name(request)
    if not setup.harness.is_builtin:  # once, and outside the time limit for a worker's start
        install_program(setup.harness.foreign_program())
    return functools.partial(build_fleet_worker, setup, names, boxes)


def _rollout_setup(request: ReinforcementRequest) -> WorkerSetup:
    max_turns = request.rollout.max_turns or request.harness.max_turns
    return _setup(
        request,
        request.harness.model_copy(update={"max_turns": max_turns}),
        -(-request.rollout.concurrent_trajectories // request.rollout_workers),
    )


def _setup(
    request: ReinforcementRequest, harness: HarnessConfig, concurrent_trajectories: int
) -> WorkerSetup:
    return WorkerSetup(
        tokenizer_directory=request.checkpoint_directory,
        problems_directory=request.problems_directory,
        harness=harness,
        grading=request.grading,
        search_directory=request.search_directory,
        concurrent_trajectories=concurrent_trajectories,
        sandbox=request.rollout.sandbox,
        sandboxes=request.sandboxes,
    )
