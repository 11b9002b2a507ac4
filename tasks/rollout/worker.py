"""One attempt from a problem to a graded trajectory, in training and evaluation.

A failure of infrastructure is an outcome without a verdict. Two other failures are graded: if the
agent's own calls ruin its box, the attempt is judged as if it had changed nothing, and an unknown
exception after the dialogue makes the attempt fail with a flag.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from typing import Protocol

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import OnTurn
from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.platform.cluster.stage_status import BoxUse
from ostinato.infra.platform.diffs import unified_diff
from ostinato.infra.platform.errors import (
    CapacityExhausted,
    OutputLimit,
    SandboxError,
    SandboxHostLost,
)
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.egress.config import NetworkRequest
from ostinato.infra.sandbox.protocol import Sandbox
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer, as_text
from ostinato.tasks.grading.environments import dialogue_of
from ostinato.tasks.problems.published import facts_of
from ostinato.tasks.records import Branch, Outcome, Problem, RewardReport, Trajectory, Verdict
from ostinato.tasks.rollout.forks import BranchWatch, branch_of, opening_of
from ostinato.tasks.rollout.records import UNGRADED, AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes

logger = logging.getLogger(__name__)
MAX_CHANGED_FILES = 20_000  # of one attempt; each is written again to be judged
OUTCOMES = {
    EndReason.FINISHED: Outcome.FINISHED,
    EndReason.TURN_LIMIT: Outcome.TRUNCATED,
    EndReason.TOKEN_LIMIT: Outcome.TRUNCATED,
    EndReason.BROKEN_CALLS: Outcome.BROKEN,
    EndReason.TIMED_OUT: Outcome.TIMED_OUT,
    EndReason.BOX_RUINED: Outcome.BROKEN,
    EndReason.HARNESS_FAILED: Outcome.BROKEN,
    EndReason.FAULT: Outcome.BROKEN,
    EndReason.SANDBOX_FAILED: Outcome.SANDBOX_FAILED,
    EndReason.ENGINE_FAILED: Outcome.ENGINE_FAILED,
}

Changes = Mapping[str, bytes | None]
GradeFunction = Callable[
    [Problem, Changes, Transcript, TestServer], Awaitable[tuple[Verdict, RewardReport]]
]


class Converse(Protocol):
    """One attempt's dialogue with a model, from its environment to the transcript."""

    async def __call__(
        self,
        environment: AgentEnvironment,
        request: AgentRequest,
        config: HarnessConfig,
        *,
        clock: Callable[[], float],
        on_turn: OnTurn | None = None,
    ) -> Transcript: ...


class RolloutWorker:
    """Worker that runs any number of concurrent attempts on one event loop."""

    def __init__(
        self,
        *,
        converse: Converse,
        harness: HarnessConfig,
        sandboxes: Sandboxes,
        grade: GradeFunction,
        clock: Callable[[], float],
        search: SearchService | None = None,
        close_dialogue: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`converse` holds the dialogue with the model. `search` answers codebase_search, None: by words only.
        `close_dialogue` closes the resources of `converse`.
        """
        self._converse = converse
        self._harness = harness
        self._sandboxes = sandboxes
        self._grade = grade
        self._clock = clock
        self._search = search or SearchService(None)
        self._close_dialogue = close_dialogue

    async def attempt(self, request: AttemptRequest) -> Trajectory:
        """Runs and grades one attempt. An exception in it becomes its outcome."""
        started_at = self._clock()
        network: list[NetworkRequest] = []
        try:
            trajectory = await self._attempt_in_box(request, started_at, network)
            return trajectory.model_copy(update={"network": tuple(network)})
        except SandboxError as error:
            detail = str(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # the cancelled task is not this one, but one that the attempt waited for
            detail = f"fault: {error!r}"
        except (
            Exception
        ) as error:  # one attempt does not end a run; the orchestrator counts failures
            logger.exception("attempt failed %s", fields(trajectory=request.trajectory_id))
            detail = f"fault: {type(error).__name__}: {error}"
        seconds = self._clock() - started_at
        transcript = Transcript.of_failure(EndReason.SANDBOX_FAILED, detail, seconds)
        failed = self._record(request, transcript, started_at)
        return failed.model_copy(update={"network": tuple(network)})

    def boxes(self) -> BoxUse:
        """Boxes that its attempts use or wait for now."""
        return self._sandboxes.use()

    async def close(self) -> None:
        await self._sandboxes.close()
        if self._close_dialogue is not None:
            await self._close_dialogue()

    async def _attempt_in_box(
        self, request: AttemptRequest, started_at: float, network: list[NetworkRequest]
    ) -> Trajectory:
        problem = request.problem
        boxes = self._sandboxes.of(problem)
        broken = problem.break_files(boxes.repository.files)
        branch, own_branch, dialogue = branch_of(request), None, None
        start = broken if branch is None else {**broken, **branch.contents()}
        try:
            async with (
                self._sandboxes.network(problem, request.trajectory_id, network) as door,
                self._sandboxes.leased(boxes, start, door) as sandbox,
            ):
                environment = self._sandboxes.workplace(
                    problem, sandbox, broken, self._harness, self._search
                )
                environment.dialogue = dialogue_of(problem)
                if branch is not None and branch.state is not None:
                    environment.state = deepcopy(branch.state)
                is_trunk = request.is_trunk and environment.dialogue is None
                watch = BranchWatch(environment) if is_trunk else None
                dialogue = await self._converse(
                    environment,
                    AgentRequest(
                        prompt=problem.prompt,
                        session_id=request.trajectory_id,
                        seed=request.seed,
                        temperature=request.temperature,
                        priority=request.priority,
                        facts=facts_of(problem, broken, self._harness),
                        opening=opening_of(request),
                    ),
                    self._harness,
                    clock=self._clock,
                    on_turn=None if watch is None else watch.on_turn,
                )
                if dialogue.end_reason in (EndReason.SANDBOX_FAILED, EndReason.ENGINE_FAILED):
                    return self._record(request, dialogue, started_at)
                transcript, changes = await self._read_changes(sandbox, dialogue, broken)
            if watch is not None:
                own_branch = watch.branch(transcript)
            elif branch is not None:
                own_branch = Branch(turns=branch.turns)
            patches = await asyncio.to_thread(  # other attempts go on meanwhile
                describe_changes, boxes.repository, broken, changes
            )
            verdict, reward = await self._grade(problem, changes, transcript, boxes.test_server)
        except SandboxError:
            raise
        except Exception as error:
            if dialogue is None:
                raise  # there is no dialogue to judge
            logger.exception("attempt failed %s", fields(trajectory=request.trajectory_id))
            fault = {"end_reason": EndReason.FAULT, "detail": f"{type(error).__name__}: {error}"}
            transcript, patches = dialogue.model_copy(update=fault), {}
            verdict, reward = await self._grade(problem, broken, transcript, boxes.test_server)
        return self._record(request, transcript, started_at, verdict, reward, patches, own_branch)

    async def _read_changes(
        self, sandbox: Sandbox, transcript: Transcript, broken: Changes
    ) -> tuple[Transcript, Changes]:
        """The transcript and the changed files in the box. If the attempt ruined its box, `broken`, as if it had
        changed nothing. A program acts in its box without calls that anybody records.
        """
        if transcript.end_reason in (EndReason.BOX_RUINED, EndReason.FAULT):
            return transcript, broken
        try:
            changes = await sandbox.diff()
            if len(changes) > MAX_CHANGED_FILES:
                raise OutputLimit(f"diff of {len(changes)} files, at most {MAX_CHANGED_FILES}")
            return transcript, changes
        except (CapacityExhausted, SandboxHostLost):
            raise
        except SandboxError as error:
            has_acted = any(turn.calls for turn in transcript.turns)
            if self._harness.is_builtin and not has_acted:
                raise
            detail = "; ".join(part for part in (str(error), transcript.detail) if part)
            ruined = {"end_reason": EndReason.BOX_RUINED, "detail": detail}
            return transcript.model_copy(update=ruined), broken

    def _record(
        self,
        request: AttemptRequest,
        transcript: Transcript,
        started_at: float,
        verdict: Verdict | None = None,
        reward: RewardReport = UNGRADED,
        changed_files: dict[str, str] | None = None,
        branch: Branch | None = None,
    ) -> Trajectory:
        transcript = transcript.model_copy(update={"detail": as_text(transcript.detail)})
        reason = transcript.end_reason.value
        return request.ended(
            OUTCOMES[transcript.end_reason],
            f"{reason}: {transcript.detail}" if transcript.detail else reason,
            transcript,
            (started_at, self._clock()),
            verdict=verdict,
            reward=reward,
            changed_files=changed_files,
            branch=branch,
        )


def describe_changes(
    repository: PreparedRepository, broken: Mapping[str, bytes], changes: Changes
) -> dict[str, str]:
    """Patches of the files that the agent changed, by path. `changes` is relative to the pristine repository."""
    patches: dict[str, str] = {}
    for path in sorted({*broken, *changes}):
        pristine = repository.files.get(path)
        before = broken.get(path, pristine)
        after = changes.get(path, pristine)
        if before != after:
            # names and contents may not be valid text, but records hold text
            patches[as_text(path)] = as_text(unified_diff(path, before, after, context_lines=0))
    return patches
