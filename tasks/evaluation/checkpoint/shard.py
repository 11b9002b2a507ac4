"""Child entry of one shard of an evaluation: an engine, boxes, and the shard's attempts."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ostinato.infra.agent.endpoint import open_client, probe
from ostinato.infra.agent.loop.messages import run_agent_outside
from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.telemetry import configure_logging, fields
from ostinato.infra.serving.engine.start import load_engine
from ostinato.tasks.evaluation.attempts import (
    AttemptFunction,
    plan_of,
    report_progress,
    run_attempts,
    shard_of,
)
from ostinato.tasks.evaluation.checkpoint.records import ShardRequest, ShardResult
from ostinato.tasks.records import Trajectory
from ostinato.tasks.rollout.config import WorkerSetup
from ostinato.tasks.rollout.graded_worker import build_worker, token_dialogue
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.worker import Converse

logger = logging.getLogger(__name__)

ROWS_FILE = "rows.jsonl"


def run_shard(request: ShardRequest, workspace: Workspace) -> ShardResult:
    """Runs the attempts of this shard with an engine and boxes of its own."""
    configure_logging()
    evaluation = request.evaluation
    plan = plan_of(evaluation)
    mine = shard_of(plan, index=request.index, count=request.count)
    rows_path = workspace.directory / ROWS_FILE
    asyncio.run(_run_attempts(request, mine, rows_path, workspace))
    return ShardResult(rows_path=str(rows_path))


async def _run_attempts(
    request: ShardRequest,
    plan: list[AttemptRequest],
    rows_path: Path,
    workspace: Workspace,
) -> None:
    evaluation = request.evaluation
    endpoint = evaluation.endpoint
    # no check of an engine that runs in this process
    check = None if endpoint is None else lambda: asyncio.to_thread(probe, endpoint)
    setup = WorkerSetup(
        tokenizer_directory=evaluation.checkpoint_directory,
        problems_directory=evaluation.problems_directory,
        harness=evaluation.harness,
        grading=evaluation.grading,
        concurrent_trajectories=evaluation.engine_slots,
        sandbox=evaluation.sandbox,
        sandboxes=evaluation.sandboxes,
        search_directory=evaluation.search_directory,
    )
    refusals: list[ConfigError] = []
    async with _dialogue(request, setup, refusals) as converse:
        worker = build_worker(setup, converse)
        try:
            await run_attempts(
                plan,
                _raise_refusals(worker.attempt, refusals),
                rows_path=rows_path,
                concurrent_attempts=evaluation.engine_slots,
                on_row=lambda rows: report_progress(
                    workspace, len(rows), len(plan), sum(row.solved for row in rows)
                ),
                check_engine=check,
            )
        finally:
            await worker.close()
    logger.info("shard is done %s", fields(index=request.index, attempts=len(plan)))


@asynccontextmanager
async def _dialogue(
    request: ShardRequest, setup: WorkerSetup, refusals: list[ConfigError]
) -> AsyncIterator[Converse]:
    """Conversations with the model, by an engine of this process or by its endpoint. `refusals`
    collects the errors of an endpoint that refuses requests because of a wrong key or model.
    """
    evaluation = request.evaluation
    if evaluation.endpoint is not None:
        async with open_client(evaluation.endpoint) as client:
            outside = partial(run_agent_outside, client, evaluation.endpoint.model)

            async def converse(*arguments: Any, **named: Any) -> Transcript:
                try:
                    return await outside(*arguments, **named)
                except ConfigError as error:
                    refusals.append(error)
                    raise

            yield converse
        return
    engine = load_engine(
        Path(evaluation.checkpoint_directory),
        f"evaluation{request.index}",
        evaluation.decoding,
        slots=evaluation.engine_slots,
        max_context_tokens=evaluation.context_tokens,
    )
    try:
        yield token_dialogue(setup, engine)
    finally:
        engine.close()


def _raise_refusals(attempt: AttemptFunction, refusals: Sequence[ConfigError]) -> AttemptFunction:
    """The same attempts, which raise the first refusal, since every attempt would be refused."""

    async def checked(item: AttemptRequest) -> Trajectory:
        trajectory = await attempt(item)
        if refusals:
            raise refusals[0]
        return trajectory

    return checked
