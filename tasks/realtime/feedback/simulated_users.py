"""SIMULATED users: a seeded program that works with the gateway over HTTP the way people would.

It stands in for people where there are none (a laptop, a test); every record it leads to carries
the tenant it is given and its report says "simulated". Numbers measured with it say that the loop
works, not that people are happier.

What one user does with each problem, in order (probabilities from SimulatedUsersConfig):
1. sends the broken file of their copy of the repository with one short sentence, and waits;
2. leaves ("abandoned") when the answer took longer than their patience, or by chance, without
   looking at it;
3. runs their own tests on the files that came back and believes the result, misreading it at the
   error rate;
4. happy: keeps the edit ("edit_kept"), sometimes gives a thumb up, sometimes looks again later
   ("edit_survived": 1 when the tests really pass, 0 when not);
5. unhappy: asks again ("dissatisfied_follow_up" on the answer so far) or reverts ("edit_reverted"),
   sometimes with a thumb down.

Each choice is drawn from a generator seeded by (seed, user, problem, turn, choice): the same
answers lead to the same choices whatever the timing; the sampling seed goes with the request. The
program sees the gateway only over HTTP; the tests it runs are a callable given to it.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
from pydantic import Field
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.realtime.config import SimulatedUsersConfig
from ostinato.tasks.records import Problem, StageRecord

logger = logging.getLogger(__name__)

Judge = Callable[[Problem, dict[str, str]], Awaitable[bool]]
"""Runs the user's tests with these files over the pristine repository; true when all pass."""

BUSY_CODES = frozenset({429, 503})
_REQUEST_SECONDS = 300.0
_MOST_TRIES = 10  # of a request that the gateway is too busy for
FOLLOW_UP_MESSAGE = "That did not fix it, the tests still fail."


class UserProblem(StageRecord):
    """Problem of a simulated user: one of Split.USER, with the broken files."""

    problem: Problem
    files: dict[str, str] = Field(description="path -> text, the state the user asks about")


class SimulatedRequest(StageRecord):
    """Outcome of one request of one simulated user."""

    user: int
    problem_id: str
    interaction_ids: tuple[str, ...]
    outcome: str
    """kept, reverted, abandoned or failed (the gateway did not answer, or the user's own box broke)"""
    really_solved: bool
    """the tests really pass with the last answer; unknown counts as false"""
    misjudged: bool
    detail: str = ""


class SimulatedUsersReport(StageRecord):
    """All requests, in the order of users and problems."""

    label: str = "simulated users, not people"
    requests: tuple[SimulatedRequest, ...]
    counts: dict[str, int]

    @classmethod
    def of(cls, requests: Sequence[SimulatedRequest]) -> "SimulatedUsersReport":
        """Counts the requests."""
        counts = Counter(request.outcome for request in requests)
        counts["requests"] = len(requests)
        counts["interactions"] = sum(len(request.interaction_ids) for request in requests)
        counts["really_solved"] = sum(request.really_solved for request in requests)
        counts["misjudged"] = sum(request.misjudged for request in requests)
        return cls(requests=tuple(requests), counts=dict(counts))


async def simulate_users(
    client: httpx.AsyncClient,
    problems: Sequence[UserProblem],
    judge: Judge,
    config: SimulatedUsersConfig,
    *,
    run_name: str = "",
    settled: Sequence[SimulatedRequest] = (),
    on_request: Callable[[SimulatedRequest], None] | None = None,
) -> SimulatedUsersReport:
    """Lets `config.users` users work at the same time. `client` carries the base url and the API
    key.

    User u brings problems u, u + users, u + 2 users ...: no two users bring the same one, none is
    brought twice. `settled` are requests of a run that was cut short, as `on_request` got them:
    they are in the report and are not made again. `run_name` is part of every idempotency key: what
    was in flight when a run was cut short is asked again and recorded once.
    """
    known = {(request.user, request.problem_id): request for request in settled}

    async def work(user: int) -> list[SimulatedRequest]:
        mine = problems[user :: config.users][: config.requests_per_user]
        done = []
        for brought in mine:
            request = known.get((user, brought.problem.problem_id))
            if request is None:
                request = await _User(client, run_name, user, brought, judge, config).work()
                if on_request is not None:
                    on_request(request)
            done.append(request)
        return done

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(work(user)) for user in range(config.users)]
    except* OstinatoError as errors:
        # the first typed error says what happened; the group around it adds nothing
        raise errors.exceptions[0] from None
    return SimulatedUsersReport.of([request for task in running for request in task.result()])


class _User:
    """One user with one problem."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        run_name: str,
        user: int,
        brought: UserProblem,
        judge: Judge,
        config: SimulatedUsersConfig,
    ) -> None:
        self._client, self._user, self._brought = client, user, brought
        self._key = f"{run_name}/{config.seed}/{user}/{brought.problem.problem_id}"
        self._judge, self._config = judge, config
        self._interactions: list[str] = []

    async def work(self) -> SimulatedRequest:
        try:
            return await self._ask_until_settled()
        except Exception as error:
            # a person whose request fails, or whose box breaks, walks away; the report shows it
            detail = f"{type(error).__name__}: {error}"
            name = self._brought.problem.problem_id
            logger.exception("simulated_user=%d problem=%s failed", self._user, name)
            return self._settled("failed", really_solved=False, misjudged=False, detail=detail)

    async def _ask_until_settled(self) -> SimulatedRequest:
        problem, config = self._brought.problem, self._config
        answer = await self._post(
            "/v1/agent/sessions",
            {
                "repository": problem.repository,
                "message": problem.prompt,
                "files": self._brought.files,
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
                await self._tell(interaction, Signal.ABANDONED)
                return self._settled("abandoned", really_solved=False, misjudged=False)
            files = {
                path: text for path, text in answer["changed_files"].items() if text is not None
            }
            solved = await self._judge(problem, self._brought.files | files)
            misjudged = self._happens(config.judgement_error_rate, turn, "misjudge")
            if solved != misjudged:
                await self._keep(interaction, solved, turn)
                return self._settled("kept", really_solved=solved, misjudged=misjudged)
            if self._happens(config.thumbs_probability, turn, "thumb"):
                await self._tell(interaction, Signal.THUMBS_DOWN)
            last = turn == config.maximum_follow_ups
            if last or not self._happens(config.follow_up_probability, turn, "follow_up"):
                await self._tell(interaction, Signal.EDIT_REVERTED)
                return self._settled("reverted", really_solved=solved, misjudged=misjudged)
            await self._tell(interaction, Signal.DISSATISFIED_FOLLOW_UP)
            answer = await self._post(
                f"/v1/agent/sessions/{session}/messages",
                {"message": FOLLOW_UP_MESSAGE, "seed": self._draw(turn + 1, "seed") % 2**31},
                key=f"{self._key}/{turn + 1}",
            )
        raise AssertionError("the last turn always settles")

    async def _keep(self, interaction: str, solved: bool, turn: int) -> None:
        await self._tell(interaction, Signal.EDIT_KEPT)
        if self._happens(self._config.thumbs_probability, turn, "thumb"):
            await self._tell(interaction, Signal.THUMBS_UP)
        if self._happens(self._config.survival_probability, turn, "survival"):
            await self._tell(interaction, Signal.EDIT_SURVIVED, 1.0 if solved else 0.0)

    async def _tell(self, interaction: str, signal: Signal, value: float = 1.0) -> None:
        body = {"interaction_id": interaction, "signal": signal.value, "value": value}
        await self._post("/v1/feedback", body | {"feedback_id": signal.value})

    async def _post(
        self, path: str, body: dict[str, Any], key: str | None = None
    ) -> dict[str, Any]:
        """Posts, and retries where the gateway says so. HTTPStatusError for other refusals."""
        retrying = AsyncRetrying(
            retry=retry_if_result(lambda answer: answer.status_code in BUSY_CODES),
            wait=_wait_seconds,
            stop=stop_after_attempt(_MOST_TRIES),
            retry_error_callback=_last_answer,
        )
        headers = {"Idempotency-Key": key} if key else {}
        response = await retrying(
            self._client.post, path, json=body, headers=headers, timeout=_REQUEST_SECONDS
        )
        response.raise_for_status()
        return response.json()

    def _happens(self, probability: float, turn: int, choice: str) -> bool:
        """A coin that depends on who, what and when in the conversation, never on the clock."""
        return self._draw(turn, choice) / 2**64 < probability

    def _draw(self, turn: int, choice: str) -> int:
        """64 random bits."""
        name = (
            f"{self._config.seed}/{self._user}/{self._brought.problem.problem_id}/{turn}/{choice}"
        )
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

    def _settled(
        self, outcome: str, *, really_solved: bool, misjudged: bool, detail: str = ""
    ) -> SimulatedRequest:
        return SimulatedRequest(
            user=self._user,
            problem_id=self._brought.problem.problem_id,
            interaction_ids=tuple(self._interactions),
            outcome=outcome,
            really_solved=really_solved,
            misjudged=misjudged,
            detail=detail,
        )


def _last_answer(state: RetryCallState) -> httpx.Response:
    assert state.outcome is not None
    return state.outcome.result()


def _wait_seconds(state: RetryCallState) -> float:
    """Wait that the last answer's Retry-After header asks for."""
    return float(_last_answer(state).headers.get("retry-after", "1"))
