"""SIMULATED users: a seeded program that uses the gateway over HTTP as people would.

It stands in for people on a laptop or in a test. Every record that it causes carries the tenant that
it was given, and its report says "simulated". Its numbers show that the loop works, not that people
are happier.

One user does the following with each problem (probabilities from SimulatedUsersConfig):
1. Sends the broken files of their copy of the repository with one short sentence, and waits.
2. Leaves without looking at the answer ("abandoned"), by chance or if it took too long.
3. Runs their own tests on the returned files and believes the result, which they misread at the
   error rate.
4. If happy, keeps the edit ("edit_kept"), may give a thumb up, and may look again later
   ("edit_survived": 1 if the tests really pass, else 0).
5. If unhappy, asks again ("dissatisfied_follow_up" on the last answer) or reverts ("edit_reverted"),
   and may give a thumb down.

Each choice is drawn from a generator seeded by (seed, user, problem, turn, choice), so equal answers
lead to equal choices whatever the timing. Requests carry a sampling seed. The program uses the gateway
only over HTTP, and the tests that it runs are a callable passed to it.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx2
from pydantic import Field
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.realtime.config import SimulatedUsersConfig
from ostinato.tasks.records import Problem, StageRecord

logger = logging.getLogger(__name__)

Judge = Callable[[Problem, dict[str, str]], Awaitable[bool]]
"""Runs the user's tests with these files over the pristine repository. True: all pass."""

BUSY_CODES = frozenset({429, 503})
_REQUEST_SECONDS = 300.0
_MAX_TRIES = 10  # tries of a request while the gateway is busy
FOLLOW_UP_MESSAGE = "That did not fix it, the tests still fail."


class UserProblem(StageRecord):
    """Problem of a simulated user, of Split.USER, with its broken files."""

    problem: Problem
    files: dict[str, str] = Field(description="path -> text of the broken files")


class SimulatedRequest(StageRecord):
    """Outcome of one request of one simulated user."""

    user: int
    problem_id: str
    interaction_ids: tuple[str, ...]
    outcome: str
    """kept, reverted, abandoned, or failed (the gateway did not answer, or the user's own box failed)"""
    really_solved: bool
    """the tests really pass with the last answer; unknown counts as false"""
    misjudged: bool
    detail: str = ""


class SimulatedUsersReport(StageRecord):
    """All requests, ordered by users and problems."""

    label: str = "simulated users, not people"
    requests: tuple[SimulatedRequest, ...]
    counts: dict[str, int]

    @classmethod
    def of(cls, requests: Sequence[SimulatedRequest]) -> "SimulatedUsersReport":
        """Report of these requests, with their counts."""
        counts = Counter(request.outcome for request in requests)
        counts["requests"] = len(requests)
        counts["interactions"] = sum(len(request.interaction_ids) for request in requests)
        counts["really_solved"] = sum(request.really_solved for request in requests)
        counts["misjudged"] = sum(request.misjudged for request in requests)
        return cls(requests=tuple(requests), counts=dict(counts))


async def simulate_users(
    client: httpx2.AsyncClient,
    problems: Sequence[UserProblem],
    judge: Judge,
    config: SimulatedUsersConfig,
    *,
    run_name: str = "",
    settled: Sequence[SimulatedRequest] = (),
    on_request: Callable[[SimulatedRequest], None] | None = None,
) -> SimulatedUsersReport:
    """Runs `config.users` concurrent users. `client` carries the base url and the API key.

    User u brings problems u, u + users, u + 2 users ..., so that no problem is brought twice.
    `settled`: requests that an interrupted run has passed to `on_request`; the report includes them,
    and they are not repeated. `run_name` is part of every idempotency key, so that requests in flight
    at an interruption are repeated but recorded once.
    """
    known = {(request.user, request.problem_id): request for request in settled}

    async def work(user: int) -> list[SimulatedRequest]:
        done = []
        for user_problem in problems[user :: config.users][: config.requests_per_user]:
            request = known.get((user, user_problem.problem.problem_id))
            if request is None:
                request = await _User(client, run_name, user, user_problem, judge, config).work()
                if on_request is not None:
                    on_request(request)
            done.append(request)
        return done

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(work(user)) for user in range(config.users)]
    except* OstinatoError as errors:
        # the first typed error says what happened; the exception group adds nothing
        raise errors.exceptions[0] from None
    return SimulatedUsersReport.of([request for task in running for request in task.result()])


class _User:
    """One user's work on one problem."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        run_name: str,
        user: int,
        user_problem: UserProblem,
        judge: Judge,
        config: SimulatedUsersConfig,
    ) -> None:
        self._client, self._user = client, user
        self._problem, self._files = user_problem.problem, user_problem.files
        self._key = f"{run_name}/{config.seed}/{user}/{self._problem.problem_id}"
        self._judge, self._config = judge, config
        self._interactions: list[str] = []

    async def work(self) -> SimulatedRequest:
        try:
            return await self._ask_until_done()
        except Exception as error:
            # as a person would, the user leaves when a request or their own box fails
            detail = f"{type(error).__name__}: {error}"
            name = self._problem.problem_id
            logger.exception("simulated_user=%d problem=%s failed", self._user, name)
            return self._finish("failed", really_solved=False, misjudged=False, detail=detail)

    async def _ask_until_done(self) -> SimulatedRequest:
        problem, config = self._problem, self._config
        answer = await self._post(
            "/v1/agent/sessions",
            {
                "repository": problem.repository,
                "message": problem.prompt,
                "files": self._files,
                "test_ids": [*problem.fail_to_pass, *problem.pass_to_pass],
                "problem_kind": problem.kind,
                "seed": self._draw(0, "seed") % 2**31,
            },
            key=f"{self._key}/0",
        )
        session = answer["session_id"]
        for turn in range(config.maximum_follow_ups + 1):
            interaction = answer["interaction_id"]
            self._interactions.append(interaction)
            impatient = answer["latency_seconds"] > config.patience_seconds
            if impatient or self._happens(config.abandon_probability, turn, "abandon"):
                await self._send(interaction, Signal.ABANDONED)
                return self._finish("abandoned", really_solved=False, misjudged=False)
            files = {
                path: text for path, text in answer["changed_files"].items() if text is not None
            }
            solved = await self._judge(problem, self._files | files)
            misjudged = self._happens(config.judgement_error_rate, turn, "misjudge")
            if solved != misjudged:
                await self._keep(interaction, solved, turn)
                return self._finish("kept", really_solved=solved, misjudged=misjudged)
            if self._happens(config.thumbs_probability, turn, "thumb"):
                await self._send(interaction, Signal.THUMBS_DOWN)
            last = turn == config.maximum_follow_ups
            if last or not self._happens(config.follow_up_probability, turn, "follow_up"):
                await self._send(interaction, Signal.EDIT_REVERTED)
                return self._finish("reverted", really_solved=solved, misjudged=misjudged)
            await self._send(interaction, Signal.DISSATISFIED_FOLLOW_UP)
            answer = await self._post(
                f"/v1/agent/sessions/{session}/messages",
                {"message": FOLLOW_UP_MESSAGE, "seed": self._draw(turn + 1, "seed") % 2**31},
                key=f"{self._key}/{turn + 1}",
            )
        raise AssertionError("the last turn always ends the work")

    async def _keep(self, interaction: str, solved: bool, turn: int) -> None:
        await self._send(interaction, Signal.EDIT_KEPT)
        if self._happens(self._config.thumbs_probability, turn, "thumb"):
            await self._send(interaction, Signal.THUMBS_UP)
        if self._happens(self._config.survival_probability, turn, "survival"):
            await self._send(interaction, Signal.EDIT_SURVIVED, 1.0 if solved else 0.0)

    async def _send(self, interaction: str, signal: Signal, value: float = 1.0) -> None:
        body = {"interaction_id": interaction, "signal": signal.value, "value": value}
        await self._post("/v1/feedback", body | {"feedback_id": signal.value})

    async def _post(
        self, path: str, body: dict[str, Any], key: str | None = None
    ) -> dict[str, Any]:
        """Posts a request, again while the gateway is busy. HTTPStatusError for other refusals."""
        retrying = AsyncRetrying(
            retry=retry_if_result(lambda answer: answer.status_code in BUSY_CODES),
            wait=_wait_seconds,
            stop=stop_after_attempt(_MAX_TRIES),
            retry_error_callback=_last_answer,
        )
        headers = {"Idempotency-Key": key} if key else {}
        response = await retrying(
            self._client.post, path, json=body, headers=headers, timeout=_REQUEST_SECONDS
        )
        response.raise_for_status()
        return response.json()

    def _happens(self, probability: float, turn: int, choice: str) -> bool:
        """A coin toss that depends on user, problem, turn and choice, not on the clock."""
        return self._draw(turn, choice) / 2**64 < probability

    def _draw(self, turn: int, choice: str) -> int:
        """64 random bits."""
        name = f"{self._config.seed}/{self._user}/{self._problem.problem_id}/{turn}/{choice}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

    def _finish(
        self, outcome: str, *, really_solved: bool, misjudged: bool, detail: str = ""
    ) -> SimulatedRequest:
        return SimulatedRequest(
            user=self._user,
            problem_id=self._problem.problem_id,
            interaction_ids=tuple(self._interactions),
            outcome=outcome,
            really_solved=really_solved,
            misjudged=misjudged,
            detail=detail,
        )


def _last_answer(state: RetryCallState) -> httpx2.Response:
    assert state.outcome is not None
    return state.outcome.result()


def _wait_seconds(state: RetryCallState) -> float:
    """Seconds in the last answer's Retry-After header."""
    return float(_last_answer(state).headers.get("retry-after", "1"))
