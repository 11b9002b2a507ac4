"""Environments of the package verifiers: their loop asks, our engine answers, and the sampled tokens are trained.

The rollout of verifiers runs unchanged: its data set gives the prompts, its tools and `env_response` the
turns, its rubric the score. Only its client is ours. The client compares incoming messages with the dialogue
so far, appends the new ones to the tokens exactly as sampled, and asks the engine. Messages that do not
continue the dialogue begin a further segment. Only this file imports verifiers. A recipe that needs it is
refused earlier if the package is absent (`environments.refuse_absent`).
"""

import asyncio
import importlib
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import Any

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.dialects.dialect import dialect_of
from ostinato.infra.agent.dialects.thoughts import parse_outside
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure
from ostinato.infra.agent.loop.attempt import Dialogue, Ending, OnTurn, run_to_end
from ostinato.infra.agent.loop.conversation import ModelAnswer, TokenConversation
from ostinato.infra.agent.loop.prompts import explain_tools
from ostinato.infra.agent.tools.calls import ParsedAnswer, ParsedCall
from ostinato.infra.agent.tools.definition import Tool, Values, declared_tool, tool_schemas
from ostinato.infra.agent.transcript import (
    CallStatus,
    DialogueScore,
    EndReason,
    Segment,
    ToolCallRecord,
    Transcript,
    TurnRecord,
)
from ostinato.infra.platform.errors import AgentError, ConfigError, ProblemError, boundary
from ostinato.infra.platform.plugins import bounded_number
from ostinato.models.decode.protocol import ModelClient
from ostinato.models.rendering import Renderer
from ostinato.models.rendering.call_results import NamedCall
from ostinato.tasks.grading.environments import Judgement, OpenBox, ProblemDraft
from ostinato.tasks.records import Problem

vf: Any = importlib.import_module("verifiers")
types: Any = importlib.import_module("verifiers.types")

MODEL = "policy"
ROW = "row"  # name of the fact with the row of the data set, as JSON
Message = Mapping[str, Any]
_loading = threading.Lock()


@cache
def load_environment(name: str) -> "VerifiersEnvironment":
    """An installed environment by its name in verifiers. A process loads it once."""
    with _loading, _signals_kept(), boundary(ConfigError, f"environment verifiers:{name}"):
        environment = vf.load_environment(name)
    if environment.requires_group_rollouts:
        raise ConfigError(
            f"environment verifiers:{name} scores the attempts at a problem together, wanted a rubric that "
            "scores each attempt alone"
        )
    return VerifiersEnvironment(name, environment)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keeps the handlers of SIGINT and SIGTERM. verifiers would replace those of the process, and fail in a
    thread, where no handler can be set.
    """
    set_handler = signal.signal
    signal.signal = lambda number, handler: signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal = set_handler


class VerifiersEnvironment:
    """Environment of verifiers. A recipe draws problems from it, and a rollout runs its dialogue."""

    files: Mapping[str, bytes] = {"README.md": b"The dialogue is the environment's.\n"}

    def __init__(self, name: str, environment: Any) -> None:
        self._name, self._environment = name, environment
        has_train = environment.dataset_source is not None
        self._rows = _rows(
            environment.get_dataset() if has_train else environment.get_eval_dataset()
        )
        has_held_out = environment.eval_dataset_source is not None
        self._held_out = _rows(environment.get_eval_dataset()) if has_held_out else self._rows

    def draw(self, rng: random.Random) -> ProblemDraft:
        """A problem from a row of the data set."""
        return _draft(rng.choice(self._rows))

    def draw_held_out(self, rng: random.Random) -> ProblemDraft:
        """A problem from a row of the evaluation data set, or of the only data set."""
        return _draft(rng.choice(self._held_out))

    async def judge(
        self, problem: Problem, files: Mapping[str, bytes], open_box: OpenBox
    ) -> Judgement:
        """A failed judgement, used only for attempts whose dialogue got no score."""
        return Judgement(passed=False, detail="the environment scored no dialogue")

    def dialogue(self, problem: Problem) -> Dialogue:
        """Function that runs the environment's rollout and scores it with the rubric."""
        return partial(self._hold, problem)

    async def _hold(
        self,
        problem: Problem,
        model: ModelClient,
        renderer: Renderer,
        request: AgentRequest,
        config: HarnessConfig,
        *,
        clock: Callable[[], float],
        on_turn: OnTurn | None,
    ) -> Transcript:
        held = _Dialogue(model, renderer, request, config, on_turn)
        started = clock()
        scores: list[DialogueScore] = []
        try:
            reason, detail = await run_to_end(self._run(problem, held, scores), config)
            await held.finish()
        finally:
            await held.close()
        is_scored = reason not in (EndReason.ENGINE_FAILED, EndReason.SANDBOX_FAILED)
        return Transcript(
            segments=held.segments(),
            turns=tuple(held.turns),
            end_reason=reason,
            final_message=held.messages[-1]["content"] if held.messages else "",
            detail=detail,
            wall_seconds=clock() - started,
            score=scores[0] if scores and is_scored else None,
        )

    async def _run(
        self, problem: Problem, held: "_Dialogue", scores: list[DialogueScore]
    ) -> Ending:
        environment = self._environment
        row = json.loads(problem.facts[ROW])
        state = await environment.rollout(row, _Client(held), MODEL, {})
        error = state.get("error")
        if isinstance(error, vf.InfraError):
            raise AgentError(f"environment verifiers:{self._name}: {error!r}")
        if error is not None:
            raise error
        await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        what = f"of attempt {held.request.session_id} in environment verifiers:{self._name}"
        reward = bounded_number(f"reward {what}", state["reward"])
        metrics = {
            name: bounded_number(f"metric {name} {what}", value, weight=0.0)
            for name, value in (state["metrics"] or {}).items()
        }
        passed = reward >= environment.pass_threshold
        scores.append(DialogueScore(reward=reward, passed=passed, metrics=metrics))
        return held.ending


def _rows(dataset: Any) -> list[dict[str, Any]]:
    rows = [dict(row) for row in dataset.to_list()]
    if not rows:
        raise ProblemError("an environment of verifiers has an empty data set, wanted rows")
    return rows


def _draft(row: Mapping[str, Any]) -> ProblemDraft:
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else _text(prompt[-1].get("content"))
    return ProblemDraft(prompt=text, facts={ROW: json.dumps(row)})


class _Client(vf.Client):
    """Client of a rollout that asks our engine. Its errors bypass the error handling of verifiers' own clients."""

    def __init__(self, held: "_Dialogue") -> None:
        super().__init__(held)

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **others: Any
    ) -> Any:
        messages = [_plain(message) for message in prompt]
        return await self.client.answer(messages, tools or ())

    # abstract methods that only the package's own `get_response`, overridden here, would call
    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError

    to_native_tool = to_native_prompt = get_native_response = setup_client
    raise_from_native_response = from_native_response = close = setup_client


@dataclass(slots=True)
class _Dialogue:
    """Messages, tokens and turns of one rollout. Parallel requests of its environment are answered one after another:
    each appends to these tokens or begins a further segment.
    """

    model: ModelClient
    renderer: Renderer
    request: AgentRequest
    config: HarnessConfig
    on_turn: OnTurn | None
    messages: list[Message] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    ending: Ending = (EndReason.FINISHED, "")
    _conversation: TokenConversation | None = None
    _finished: list[Segment] = field(default_factory=list)
    _tools: dict[str, Tool] = field(default_factory=dict)
    _pending: tuple[ModelAnswer, tuple[ToolCallRecord, ...]] | None = None
    _call_ids: list[str] = field(default_factory=list)  # of calls without a result
    _generated_tokens: int = 0
    _one_answer: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, messages: list[Message], tools: Sequence[Any]) -> Any:
        """The model's next message. At a limit: OverlongPromptError, which ends the rollout."""
        async with self._one_answer:
            return await self._answer(messages, tools)

    async def _answer(self, messages: list[Message], tools: Sequence[Any]) -> Any:
        conversation = await self._reach(messages, tools)
        config = self.config
        left = config.max_generated_tokens - self._generated_tokens
        budget = min(left, config.context_tokens - conversation.num_tokens)
        if len(self.turns) >= config.max_turns:
            self.ending = EndReason.TURN_LIMIT, ""
        elif budget <= 0:
            self.ending = EndReason.TOKEN_LIMIT, ""
        if self.ending[0] is not EndReason.FINISHED:
            raise vf.OverlongPromptError(f"limit of the harness: {self.ending[0]}")
        prompt_ids = list(conversation.builder.token_ids)
        answer = await conversation.answer(budget)
        self._generated_tokens += answer.generated_tokens
        if not answer.is_whole:
            self.ending = EndReason.TOKEN_LIMIT, f"answer cut: {answer.cut_reason}"
        calls = _numbered(answer.parsed.calls, len(self.turns) + 1)
        if any(call.status is CallStatus.MALFORMED for call in calls):
            calls, conversation.unanswered = [], []  # treated as text, as inference servers do
        text = answer.parsed.prose if calls else answer.text.strip()
        self._call_ids = [call.call_id for call in calls]
        self._pending = answer, tuple(map(_record, calls))
        message = {
            "role": "assistant",
            "content": text,
            "tool_calls": [
                {"id": call.call_id, "name": call.tool, "arguments": _arguments(call)}
                for call in calls
            ],
        }
        self.messages = [*messages, _plain(message)]
        return self._response(conversation, prompt_ids, message, answer)

    async def finish(self) -> None:
        """Ends the last turn."""
        await self._end_turn(())

    async def close(self) -> None:
        if self._conversation is not None:
            await self._conversation.close()

    def segments(self) -> tuple[Segment, ...]:
        """Segments of all branches of the dialogue, the current branch last."""
        now = () if self._conversation is None else self._conversation.segments()
        return (*self._finished, *now)

    async def _reach(self, messages: list[Message], tools: Sequence[Any]) -> TokenConversation:
        """The conversation that ends with these messages: the current one if they continue it, else a new one."""
        known = len(self.messages)
        new = messages[known:]
        continues = messages[:known] == self.messages and self.messages and new
        await self._end_turn(new if continues else ())
        conversation = self._conversation
        if conversation is not None and continues and self._append(conversation, new):
            return conversation
        if conversation is not None:
            self._finished += conversation.segments()
            await conversation.close()
        self._conversation = self._open(messages, tools)
        return self._conversation

    def _open(self, messages: list[Message], tools: Sequence[Any]) -> TokenConversation:
        dialect = dialect_of(self.config)
        self._tools = {
            tool.name: declared_tool(tool.name, tool.description, tool.parameters, _refuse, "")
            for tool in tools
        }
        if self._tools and not dialect.is_explained:
            raise ConfigError(
                f"harness.dialect is {self.config.dialect!r}, wanted full or a published one: the "
                f"environment has tools of its own, {', '.join(self._tools)}"
            )
        start = next((n for n, each in enumerate(messages) if each["role"] != "system"), 0)
        system = "\n\n".join(each["content"] for each in messages[:start])
        is_stated = self.renderer.states_functions and dialect.is_published
        if self._tools and not is_stated:
            explained = explain_tools(self._tools.values(), self.config)
            system = f"{system}\n\n{explained}" if system else explained
        first, *others = messages[start:]
        if first["role"] != "user":
            raise ValueError(f"the first message has the role {first['role']!r}, wanted 'user'")
        number = len(self._finished)
        name = self.request.session_id + (f"~{number}" if number else "")
        conversation = TokenConversation(
            self.model,
            self.renderer,
            self.request.model_copy(update={"session_id": name}),
            self._read,
            prompt=first["content"],
            system_prompt=system or None,
            tools=tuple(tool_schemas(self._tools.values())) if is_stated else (),
            is_published=dialect.is_published,
        )
        for is_answer, group in groupby(others, key=lambda each: each["role"] == "assistant"):
            following = list(group)
            if is_answer:
                self._append_answers(conversation, following)
            elif not self._append(conversation, following):
                raise ValueError(f"messages {following} follow no answer that they belong to")
        return conversation

    def _append(self, conversation: TokenConversation, new: Sequence[Message]) -> bool:
        """Appends results of calls and messages of the user. False if they do not fit the last answer."""
        results = {each["tool_call_id"]: each["content"] for each in new if each["role"] == "tool"}
        others = [each["content"] for each in new if each["role"] == "user"]
        if len(results) + len(others) < len(new) or (results and set(results) != {*self._call_ids}):
            return False
        if results:
            conversation.append_results([results[each] for each in self._call_ids], None, None)
        for text in others:
            conversation.append_user(text)
        self._call_ids = []
        return True

    def _append_answers(self, conversation: TokenConversation, messages: Sequence[Message]) -> None:
        """Appends assistant messages that the model did not sample here, as untrained context."""
        write = dialect_of(self.config).write
        calls = [call for message in messages for call in message["tool_calls"]]
        if calls and write is None:
            raise ConfigError(
                f"dialect {self.config.dialect!r} cannot write the tool calls that the prompt has"
            )
        written = [write(name, json.loads(arguments)) for _, name, arguments in calls if write]
        texts = [message["content"] for message in messages]
        text = "\n".join(filter(None, [*texts, *written]))
        conversation.builder.append_unsampled(self.renderer.encode_answer(text))
        conversation.has_header = False
        conversation.unanswered = [NamedCall(name, call_id) for call_id, name, _ in calls]
        self._call_ids = [call_id for call_id, _, _ in calls]

    def _read(self, text: str, is_opened: bool) -> ParsedAnswer:
        dialect = dialect_of(self.config)
        return parse_outside(
            text,
            dialect.find_calls,
            lambda rest: (
                dialect.parse(rest, self._tools) if self._tools else ParsedAnswer((), rest)
            ),
            is_opened=is_opened,
        )

    async def _end_turn(self, replies: Sequence[Message]) -> None:
        if self._pending is None:
            return
        answer, calls = self._pending
        self._pending = None
        turn = TurnRecord(
            generated_tokens=answer.generated_tokens,
            text=answer.text,
            calls=calls,
            results=tuple(reply["content"] for reply in replies),
        )
        self.turns.append(turn)
        if self.on_turn is not None:
            await self.on_turn(turn)

    def _response(
        self,
        conversation: TokenConversation,
        prompt_ids: list[int],
        message: Message,
        answer: ModelAnswer,
    ) -> Any:
        segment = conversation.builder.build()
        start = len(prompt_ids)
        completion_ids = segment.token_ids_T[start:].tolist()
        reason = "tool_calls" if message["tool_calls"] else "stop"
        return types.Response(
            id=f"{conversation.session_id}/{conversation.num_requests}",
            created=0,
            model=MODEL,
            usage=types.Usage(
                prompt_tokens=start,
                reasoning_tokens=0,
                completion_tokens=len(completion_ids),
                total_tokens=start + len(completion_ids),
            ),
            message=types.ResponseMessage(
                content=message["content"],
                tool_calls=[types.ToolCall(**call) for call in message["tool_calls"]] or None,
                finish_reason=reason if answer.is_whole else "length",
                is_truncated=not answer.is_whole,
                tokens=types.ResponseTokens(
                    prompt_ids=prompt_ids,
                    prompt_mask=[0] * start,
                    completion_ids=completion_ids,
                    completion_mask=segment.loss_mask_T[start:].astype(int).tolist(),
                    completion_logprobs=segment.logprobs_T[start:].tolist(),
                ),
            ),
        )


def _numbered(calls: Sequence[ParsedCall], turn: int) -> list[ParsedCall]:
    """The calls with ids. Ids that the model wrote are kept."""
    return [
        replace(call, call_id=call.call_id or f"call_{turn}_{index}")
        for index, call in enumerate(calls, start=1)
    ]


def _record(call: ParsedCall) -> ToolCallRecord:
    return ToolCallRecord(
        tool=call.tool,
        arguments=call.arguments,
        status=call.status,
        wall_seconds=0.0,
        call_id=call.call_id,
    )


def _arguments(call: ParsedCall) -> str:
    """Arguments as JSON. If the call does not fit its tool, the raw texts, so that the environment reports the fault."""
    return json.dumps(call.values if call.status is CallStatus.OK else call.arguments)


def _plain(message: Any) -> Message:
    """The relevant fields of a message, in one form."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    calls = fields.get("tool_calls") or ()
    return {
        "role": "user" if fields["role"] == "text" else fields["role"],  # "text": a plain prompt
        "content": _text(fields.get("content")),
        "tool_calls": tuple((call["id"], call["name"], call["arguments"]) for call in calls),
        "tool_call_id": fields.get("tool_call_id"),
    }


def _text(content: Any) -> str:
    """Text of a message's content. ProblemError for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise ProblemError(f"a message has a part of type {part.get('type')!r}, wanted text")
    return "\n".join(part["text"] for part in content)


async def _refuse(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    raise ToolFailure("the environment runs its own tools")
