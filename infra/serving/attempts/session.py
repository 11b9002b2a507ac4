"""The chats of one attempt's program with the model, kept as a graph of sampled turns.

The program decides what a prompt says and how long an answer may be. The run decides how tokens are sampled, so
the program's requests for temperatures, seeds or log-probabilities are ignored.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from weakref import WeakValueDictionary

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.sessions import SampledTurn, SessionGraph
from ostinato.infra.agent.transcript import EndReason, Transcript, TurnRecord
from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.gateway.answers.completions import Answered, ChatService, Finished
from ostinato.infra.serving.gateway.answers.generation import Answering
from ostinato.infra.serving.gateway.answers.messages import ChatHistory
from ostinato.infra.serving.gateway.arms import CONTROL, Arm, ArmTable
from ostinato.infra.serving.gateway.config import Caller, GatewayConfig
from ostinato.infra.serving.gateway.failures import CONTEXT_FULL, ApiError
from ostinato.infra.serving.gateway.schemas import ChatMessage, ChatRequest
from ostinato.models.decode.protocol import ModelClient, StopReason
from ostinato.models.rendering import Renderer

MAX_REFUSED = 12  # refused requests in a row; clients send some of them three times
MAX_WITHOUT_ANSWER = 300  # requests of any kind since the last answer
_TOO_MANY = 429
MAX_AT_ONCE = 16  # answers of one attempt that are sampled at the same time
_LEAST_TOKENS = 64  # an answer reserves as many at once, where that many are free
_WAIT_SECONDS = 1.0  # after which a client may ask again for an answer beyond those
_STREAM_END_SECONDS = 2.0
_WHOLE = (StopReason.STOP_TOKEN, StopReason.LENGTH)


class AttemptSession:
    """The chats of one attempt, and their limits."""

    def __init__(
        self,
        model: ModelClient,
        renderer: Renderer,
        request: AgentRequest,
        config: GatewayConfig,
        clock: Callable[[], float],
    ) -> None:
        self.key = secrets.token_urlsafe(32)
        self.caller = Caller(name=secrets.token_hex(8))
        self.graph = SessionGraph()
        self.ended = asyncio.Event()
        self.ending: tuple[EndReason, str] = (EndReason.FINISHED, "")
        self.last_refusal = ""  # since the last answer
        self.num_requests = 0  # that are open
        self.is_context_full = False  # for the newest prompt
        self.engine_failure = ""  # of the newest answer; empty: it succeeded
        self._model, self._renderer, self._request = model, renderer, request
        self._harness: HarnessConfig = config.harness
        arms = ArmTable(Arm(CONTROL, "", 0, model))
        self._chat = ChatService(config, arms, renderer, self, clock)
        # by interaction id; weak, since a stream whose client is gone before it starts is never told to end
        self._running: WeakValueDictionary[str, Answering] = WeakValueDictionary()
        self._unread: dict[str, Answering] = {}  # by hash of the request; may lack their readers
        self._tasks: dict[str, asyncio.Task[Finished]] = {}
        self._engine_sessions: list[str] = []
        self._num_started = self._num_refused = self._num_idle = 0
        self._num_beginning = 0  # requests whose prompts are being rendered
        self._reserved_tokens = 0  # may still be sampled by the running generations
        self._returned = asyncio.Event()  # when some of those are free again

    # --- called by the routes

    async def begin(
        self, request: ChatRequest, tenant: Caller, client_session: str | None
    ) -> Answering:
        """As `ChatService.begin`. A repeated request gets the earlier answer if that one's client left without it."""
        sampling = {
            "temperature": self._request.temperature,
            "top_p": self._request.top_p,
            "seed": None,
            "logprobs": False,
            "top_logprobs": None,
            "return_token_ids": False,
        }
        request = request.model_copy(update=sampling)
        request_hash = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
        unread = self._unread.get(request_hash)
        if unread is not None and not unread.is_delivered:
            is_left = unread.is_client_gone is not None and await unread.is_client_gone()
            if is_left:
                return unread
        left_tokens = self._check_limits()
        self._num_beginning += 1
        try:
            answering = await self._chat.begin(request, tenant, None)
        except ApiError as refusal:
            self.is_context_full = refusal.code == CONTEXT_FULL
            raise
        finally:
            self._num_beginning -= 1
        self._refuse_after_end()
        self.is_context_full = False
        self._engine_sessions.append(answering.session_id)
        answering.seed = self._request.seed + self._num_started
        answering.priority = self._request.priority
        answering.budget_tokens = min(answering.budget_tokens, left_tokens)
        answering.reserve = self._reserve
        self._num_started += 1
        self._running[answering.interaction_id] = answering
        if not request.stream:
            self._unread[request_hash] = answering
        return answering

    async def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that a request would have as a new conversation."""
        return await self._chat.count_tokens(request)

    async def answer(self, answering: Answering) -> Finished:
        """The whole answer. It is sampled once for all its readers, and to its end if they leave."""
        task = self._tasks.get(answering.interaction_id)
        if task is None:
            task = asyncio.create_task(self._chat.answer(answering))
            self._tasks[answering.interaction_id] = task
            task.add_done_callback(lambda _: self._running.pop(answering.interaction_id, None))
        try:
            return await asyncio.shield(task)
        except EngineError as error:
            self._note_failure(answering, error)
            raise

    async def stream(self, answering: Answering) -> AsyncGenerator[str | Finished, None]:
        """Text as generated, then the finished answer. Sampling stops when the client leaves."""
        try:
            async with aclosing(self._chat.stream(answering)) as pieces:
                async for piece in pieces:
                    yield piece
        except EngineError as error:
            self._note_failure(answering, error)
            raise
        finally:
            self._running.pop(answering.interaction_id, None)

    def note_response(self, status: int, refusal: str) -> None:
        """Counts a response. `refusal`: the beginning of an error's message."""
        self._num_idle += 1
        is_refused = 400 <= status < 500 and status != _TOO_MANY
        self._num_refused = self._num_refused + 1 if is_refused else 0
        if is_refused:
            self.last_refusal = f"{status} {refusal}"
        if self._num_refused >= MAX_REFUSED:
            detail = f"{self._num_refused} refused requests in a row, the last: {self.last_refusal}"
            self.end(EndReason.BROKEN_CALLS, detail)
        elif self._num_idle >= MAX_WITHOUT_ANSWER:
            detail = f"{self._num_idle} requests without an answer of the model"
            self.end(EndReason.BROKEN_CALLS, detail)

    # --- called by the chats

    def find(self, tenant: str, keys: Sequence[str]) -> tuple[ChatHistory | None, int]:
        """As `SessionGraph.find`. The first chat that continues an answer keeps its engine session; later ones
        get new sessions.
        """
        turn, place = self.graph.find(keys)
        if turn is None:
            return None, 0
        session_id = turn.session_id
        if turn.is_continued:
            session_id = f"{self._request.session_id}#{secrets.token_hex(4)}"
        turn.is_continued = True
        return ChatHistory(session_id, tuple(turn.builder.token_ids), turn, place), place

    async def keep(self, answered: Answered) -> None:
        """Adds an answer to the graph."""
        answering = answered.answering
        self._running.pop(answering.interaction_id, None)
        if not answering.answer_ids:
            return
        self._num_idle = 0
        self.engine_failure = self.last_refusal = ""
        key = answered.key if answering.stop_reason in _WHOLE else None
        end_id = self._renderer.end_id
        if key is not None and answering.builder.token_ids[-1] != end_id:
            # cut at a limit: the next message follows an end token that was not sampled
            answering.builder.append_unsampled([end_id])
        earlier = answering.earlier
        parent = None if earlier is None else earlier.turn
        if earlier is not None and parent is not None and not parent.record.results:
            results = _results(answering.request.messages[earlier.num_messages :])
            parent.record = parent.record.model_copy(update={"results": results})
        turn = SampledTurn(answering.builder, answered.turn, parent, answering.session_id)
        self.graph.add(turn, key)

    # --- called by the attempt

    def end(self, reason: EndReason, detail: str) -> None:
        """Ends the attempt. Only the first reason counts."""
        if not self.ended.is_set():
            self.ending = (reason, detail)
            self.ended.set()

    async def close(self) -> None:
        """Ends running answers and frees the engine's cache. The sampled part of streams is kept."""
        self.ended.set()
        for interaction_id, task in self._tasks.items():
            task.cancel()
            self._running.pop(interaction_id, None)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_STREAM_END_SECONDS):
                while self._running:  # their clients are gone, which the server soon notices
                    await asyncio.sleep(0.01)
        for session_id in dict.fromkeys(self._engine_sessions):
            await self._model.end_session(session_id)

    def transcript(
        self, reason: EndReason, detail: str, final_message: str, wall_seconds: float
    ) -> Transcript:
        """The record of the attempt, its turns in the order of their tokens."""
        turns = [turn for branch in self.graph.branches() for turn in branch]
        places = {id(turn): place for place, turn in enumerate(turns)}
        return Transcript(
            segments=self.graph.segments(),
            turns=tuple(
                _placed(turn, place, -1 if turn.parent is None else places[id(turn.parent)])
                for place, turn in enumerate(turns)
            ),
            end_reason=reason,
            final_message=final_message,
            detail=detail,
            wall_seconds=wall_seconds,
        )

    def _check_limits(self) -> int:
        """Tokens that are left. When turns or tokens are used up, the attempt ends with ApiError. Answers beyond
        MAX_AT_ONCE, or beyond the turns that are left, are refused until others have ended.
        """
        left_tokens = self._left_tokens()
        if len(self.graph.turns) >= self._harness.max_turns:
            self.end(EndReason.TURN_LIMIT, "")
        elif left_tokens <= 0:
            self.end(EndReason.TOKEN_LIMIT, "")
        self._refuse_after_end()
        num_running = len(self._running) + self._num_beginning
        most = min(MAX_AT_ONCE, self._harness.max_turns - len(self.graph.turns))
        if num_running >= most:
            raise ApiError(
                _TOO_MANY,
                f"{num_running} answers of this attempt are being sampled, wanted fewer than {most}; ask again when "
                "one has ended",
                code="rate_limit_exceeded",
                retry_after_seconds=_WAIT_SECONDS,
            )
        return left_tokens

    def _left_tokens(self) -> int:
        sampled = sum(turn.record.generated_tokens for turn in self.graph.turns)
        sampled += sum(len(answering.answer_ids) for answering in self._running.values())
        return self._harness.max_generated_tokens - sampled

    @asynccontextmanager
    async def _reserve(self, most_tokens: int) -> AsyncIterator[int]:
        """Reserves tokens for one generation: at most half of those that are free, since answers at the same time
        share the limit. Waits while other generations hold the rest, which they may not need.
        """
        while (free := self._left_tokens() - self._reserved_tokens) <= 0 < self._reserved_tokens:
            await self._returned.wait()
        granted = max(0, min(most_tokens, free, max(free // 2, _LEAST_TOKENS)))
        self._reserved_tokens += granted
        try:
            yield granted
        finally:
            self._reserved_tokens -= granted
            self._returned.set()
            self._returned = asyncio.Event()

    def _refuse_after_end(self) -> None:
        if self.ended.is_set():
            raise ApiError(403, f"the attempt is over: {self.ending[0].value}", code="attempt_over")

    def _note_failure(self, answering: Answering, error: EngineError) -> None:
        self.engine_failure = str(error)
        self._running.pop(answering.interaction_id, None)
        answering.is_delivered = True  # a retry samples a new answer


def _results(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """Results of an answer's calls: the tools' messages, or the client's other messages if there are none."""
    replies: list[ChatMessage] = []
    for message in messages:
        if message.role == "assistant":
            break
        replies.append(message)
    tools = [message.text for message in replies if message.role == "tool"]
    return tuple(tools or (message.text for message in replies))


def _placed(turn: SampledTurn, place: int, parent: int) -> TurnRecord:
    if parent == place - 1:
        return turn.record
    return turn.record.model_copy(update={"continues": parent})
