"""The two ways to talk with a model: in tokens, or in messages of an OpenAI-style API.

`TokenConversation` keeps the exact tokens and makes the segments that training reads. The message
form is in messages.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ostinato.infra.agent.config import AgentRequest, HarnessConfig, ToolPolicy
from ostinato.infra.agent.dialects.dialect import dialect_of, enabled_tools, offered_tools
from ostinato.infra.agent.dialects.edits.blocks import read_edits
from ostinato.infra.agent.dialects.thoughts import opens_thought, parse_outside
from ostinato.infra.agent.loop.segments import SegmentBuilder
from ostinato.infra.agent.tools.calls import ParsedAnswer
from ostinato.infra.agent.tools.definition import Tool, tool_schemas
from ostinato.infra.agent.transcript import SamplingDistribution, Segment
from ostinato.infra.platform.errors import EngineError
from ostinato.models.decode.protocol import GenerateRequest, ModelClient, StopReason
from ostinato.models.rendering import Renderer
from ostinato.models.rendering.call_results import NamedCall

CallReader = Callable[[str, bool], ParsedAnswer]
"""Returns the calls and prose of an answer's text. The flag: whether the prompt opened a thought."""
SHORTEST_CUT_CHARACTERS = 40
INTERRUPTED = "error: stopped by the user before it ended"


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One answer of the model. An answer that was cut has no calls to run."""

    text: str
    parsed: ParsedAnswer
    generated_tokens: int
    is_whole: bool
    cut_reason: str = ""
    begins_in_thought: bool = False  # the prompt opened a thought


class Conversation(Protocol):
    """Dialogue with a model: takes messages and results, returns answers."""

    @property
    def num_tokens(self) -> int:
        """Length of the context now."""
        ...

    async def answer(self, max_new_tokens: int) -> ModelAnswer: ...

    def append_results(
        self, results: Sequence[str], note: str | None, room_tokens: int | None
    ) -> None:
        """Adds tool results in call order, cut further if they take more than `room_tokens`."""
        ...

    def append_user(self, text: str) -> None: ...

    async def restart(self, prompt: str) -> None:
        """Ends the segment. The next one begins with `prompt`."""
        ...

    def segments(self) -> tuple[Segment, ...]: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class TokenConversation:
    """Dialogue in tokens. Sampled tokens are kept as sampled, and the template only appends."""

    model: ModelClient
    renderer: Renderer
    request: AgentRequest
    read_calls: CallReader
    prompt: str
    system_prompt: str | None
    tools: tuple[dict[str, Any], ...] = ()  # tools that the template states
    is_published: bool = False  # results have the form of the template
    builder: SegmentBuilder = field(init=False)
    finished_segments: list[Segment] = field(default_factory=list)
    num_requests: int = 0
    has_header: bool = True  # the tokens end with the opening of the next answer
    unanswered: list[NamedCall] = field(default_factory=list)  # calls that have no result yet

    def __post_init__(self) -> None:
        opening = self.request.opening
        if opening is not None:
            tokens = opening.segment.token_ids_T.tolist()
            self.builder = SegmentBuilder(tokens, self._sampling, opening.segment)
            return
        if self.request.earlier_token_ids:
            tokens = [*self.request.earlier_token_ids, *self.renderer.append_user(self.prompt)]
        else:
            tokens = self.renderer.start(self.prompt, self.system_prompt, self.tools)
        self.builder = SegmentBuilder(tokens, self._sampling)

    def _show_results(self, results: Sequence[str], note: str | None) -> list[int]:
        calls = self.unanswered if self.is_published else ()
        return self.renderer.append_results(results, note, calls)

    @property
    def num_tokens(self) -> int:
        """Length of the segment."""
        return len(self.builder.token_ids)

    @property
    def _sampling(self) -> SamplingDistribution:
        return SamplingDistribution(temperature=self.request.temperature, top_p=self.request.top_p)

    @property
    def session_id(self) -> str:
        """Name of the engine's session, one per segment."""
        suffix = f"#{len(self.finished_segments)}" if self.finished_segments else ""
        return self.request.session_id + suffix

    async def answer(self, max_new_tokens: int) -> ModelAnswer:
        """Samples the next answer. EngineError when it was cancelled."""
        request = self.request
        generation = await self.model.generate(
            GenerateRequest(
                request_id=f"{request.session_id}/{self.num_requests}",
                session_id=self.session_id,
                token_ids=tuple(self.builder.token_ids),
                max_new_tokens=max_new_tokens,
                stop_token_ids=self.renderer.stop_token_ids,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed + self.num_requests,
                priority=request.priority,
                return_routes=request.return_routes,
            )
        )
        self.num_requests += 1
        is_opened = opens_thought(self.renderer, self.builder.token_ids)
        self.builder.append_generation(generation)
        self.has_header = False
        if generation.stop_reason is StopReason.CANCELLED:
            raise EngineError(f"generation {generation.request_id} was cancelled")
        ids = generation.token_ids
        if ids and ids[-1] in self.renderer.stop_token_ids:
            ids = ids[:-1]
        text = self.renderer.decode(ids)
        is_whole = generation.stop_reason is StopReason.STOP_TOKEN
        parsed = self.read_calls(text, is_opened) if is_whole else ParsedAnswer((), text)
        self.unanswered = [NamedCall(call.tool, call.call_id) for call in parsed.calls]
        return ModelAnswer(
            text,
            parsed,
            len(generation.token_ids),
            is_whole,
            "" if is_whole else generation.stop_reason,
            is_opened,
        )

    def append_results(
        self, results: Sequence[str], note: str | None, room_tokens: int | None
    ) -> None:
        """Adds the results. Halves the longest until they fit into `room_tokens`."""
        texts = list(results)
        tokens = self._show_results(texts, note)
        while room_tokens is not None and len(tokens) > room_tokens:
            longest = max(range(len(texts)), key=lambda index: len(texts[index]))
            if len(texts[longest]) <= SHORTEST_CUT_CHARACTERS:
                break
            texts[longest] = cut_to_fit(texts[longest], len(texts[longest]) // 2)
            tokens = self._show_results(texts, note)
        self.builder.append_unsampled(tokens)
        self.has_header, self.unanswered = True, []

    def append_user(self, text: str) -> None:
        """Adds a user message in place of the header, which no engine has seen yet. Interrupted calls are
        answered first, so that every call has a result.
        """
        if self.unanswered:
            self.append_results([INTERRUPTED] * len(self.unanswered), None, None)
        if self.has_header:
            self.builder.drop_answer_header(self.renderer.header_size(self.builder.token_ids))
        elif self.builder.token_ids[-1] != self.renderer.end_id:
            self.builder.append_unsampled([self.renderer.end_id])
        self.builder.append_unsampled(self.renderer.append_user(text))
        self.has_header = True

    async def restart(self, prompt: str) -> None:
        """Keeps the segment for training and opens the next."""
        old_session_id = self.session_id
        self.finished_segments.append(self.builder.build())
        await self.model.end_session(old_session_id)
        tokens = self.renderer.start(prompt, self.system_prompt, self.tools)
        self.builder = SegmentBuilder(tokens, self._sampling)
        self.has_header, self.unanswered = True, []

    def segments(self) -> tuple[Segment, ...]:
        """Every segment so far, the present one last."""
        return (*self.finished_segments, self.builder.build())

    async def close(self) -> None:
        """Ends the engine's session."""
        await self.model.end_session(self.session_id)


def cut_to_fit(text: str, limit_characters: int) -> str:
    """The beginning of a result that does not fit into the context."""
    note = " [cut: context nearly full]"
    return text[: max(0, limit_characters - len(note))] + note


def stated_tools(
    renderer: Renderer, config: HarnessConfig, tools: Mapping[str, Tool]
) -> tuple[dict[str, Any], ...]:
    """The tools that the chat template states. Empty for our own dialects, and if the template states no tools."""
    is_stated = renderer.states_functions and dialect_of(config).is_published
    return tuple(tool_schemas(tools.values())) if is_stated else ()


def call_reader(
    config: HarnessConfig,
    policy: ToolPolicy,
    own: Mapping[str, Tool] | None = None,
    *,
    reads_calls: bool = True,
) -> CallReader:
    """The parser of the calls of a dialect, for the tools that an attempt may call, and of edits in the answer's text.
    `own`: tools of its environment. `reads_calls`: False if a server has read the calls, so that the text is prose.
    """
    dialect = dialect_of(config)
    own = own or {}
    offered, tools = offered_tools(config, policy, own), enabled_tools(config, policy, own)

    def parse(text: str) -> ParsedAnswer:
        answer = dialect.parse(text, offered) if reads_calls else ParsedAnswer((), text)
        if config.edits == "tool":
            return answer
        edits = read_edits(answer.prose, config.edits, tools)
        return ParsedAnswer((*edits.calls, *answer.calls), edits.prose)

    return lambda text, is_opened: parse_outside(
        text, dialect.find_calls, parse, is_opened=is_opened
    )
