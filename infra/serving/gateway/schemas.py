"""Requests and answers of the HTTP API.

Chat completions follow OpenAI's format. Fields that we do not read are ignored, except documented fields that
would change the answer: answers/completions.py refuses those by name. Our own endpoints refuse unknown fields.
Lists are checked up to their first wrong entry: describing thousands would delay other requests.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ostinato.infra.serving.gateway.config import MAX_MESSAGES, MAX_UPLOAD_FILES
from ostinato.infra.serving.gateway.signals import GATEWAY_SIGNALS, OWN_FEEDBACK, Signal


def _check_client_signal(signal: Signal) -> Signal:
    if signal in GATEWAY_SIGNALS:
        raise ValueError(f"signal {signal.value} is measured by the gateway, not sent")
    return signal


ClientSignal = Annotated[
    Signal,
    AfterValidator(_check_client_signal),
    WithJsonSchema({"type": "string", "enum": sorted(set(Signal) - GATEWAY_SIGNALS)}),
]


def _check_storable(text: str) -> str:
    if "\0" in text:  # PostgreSQL cannot store one
        raise ValueError("wanted a text without a zero byte")
    return text


def _check_feedback_id(feedback_id: str) -> str:
    if feedback_id.startswith(OWN_FEEDBACK):
        raise ValueError(f"wanted an id that does not begin with {OWN_FEEDBACK}")
    return _check_storable(feedback_id)


Name = Annotated[
    str, AfterValidator(_check_storable), Field(json_schema_extra={"pattern": r"^[^\x00]*$"})
]
FeedbackId = Annotated[
    str,
    AfterValidator(_check_feedback_id),
    Field(max_length=200, json_schema_extra={"pattern": rf"^(?!{OWN_FEEDBACK})[^\x00]*$"}),
]


def _bounded(files: object) -> object:
    if isinstance(files, dict) and len(files) > MAX_UPLOAD_FILES:
        raise ValueError(f"{len(files)} files, wanted at most {MAX_UPLOAD_FILES}")
    return files


Uploads = Annotated[dict[str, str], Field(max_length=MAX_UPLOAD_FILES), BeforeValidator(_bounded)]
"""Path -> text. The files are counted before any of them is checked."""


class Wire(BaseModel):
    """Base of our own endpoints' requests and answers. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_later_unknowns(cls, sent: object) -> object:
        """Drops all unknown fields except the first, so that the error names one field."""
        if not isinstance(sent, dict):
            return sent
        known = cls.model_fields
        unknown = [name for name in sent if name not in known]
        return {name: sent[name] for name in (*(sent.keys() & known.keys()), *unknown[:1])}


class OpenAIWire(BaseModel):
    """Base of the OpenAI endpoints' requests. Fields that are not read are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class FunctionCall(OpenAIWire):
    """Name and JSON arguments of a call."""

    name: str
    arguments: str = "{}"


class ToolCall(OpenAIWire):
    """One call in an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


def _form_of(content: Any) -> str:
    return "list" if isinstance(content, list) else "text"


Listed = TypeVar("Listed")
TextOr = Annotated[
    Annotated[str, Tag("text")] | Annotated[Listed, Tag("list")], Discriminator(_form_of)
]
"""A text or a list. An error describes the form that was sent."""


def kind_of(block: Any, default: str = "") -> str:
    """The type of a block, which is the tag of its union."""
    if isinstance(block, dict):
        return str(block.get("type", default))
    return str(getattr(block, "type", default))


class TextPart(OpenAIWire):
    """A piece of text in a message's content list."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: object) -> object:
        if isinstance(part, dict) and part.get("type") != "text":
            raise ValueError(
                f"a part of type {str(part.get('type'))[:40]!r}, wanted type 'text': the model reads only text"
            )
        return part


Text = TextOr[Annotated[list[TextPart], Field(fail_fast=True)]]


class ChatMessage(OpenAIWire):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, fail_fast=True)
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def num_characters(self) -> int:
        """Characters of text and calls, which are tokenised."""
        calls = [call.function for call in self.tool_calls or ()]
        return len(self.text) + sum(len(call.name) + len(call.arguments) for call in calls)


class FunctionDefinition(OpenAIWire):
    """A tool as the client declares it. The compact dialect's prompt uses only the name, others all of it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema")


class ToolDefinition(OpenAIWire):
    """One entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class StreamOptions(OpenAIWire):
    """Optional content of a stream."""

    include_usage: bool = False


class SampledRequest(OpenAIWire):
    """Fields that a request for an answer has in every API."""

    model_config = ConfigDict(extra="allow")  # kept, since some are refused by name

    model: str
    """id that GET /v1/models gives"""
    stream: bool | None = None
    """true: the answer is sent as events while it is made"""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """sampling temperature; 0: greedy"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """probability of the likeliest tokens that are sampled from"""
    store: bool | None = Field(
        default=None,
        description="permission to store the interaction; false withdraws the tenant's consent for "
        "this request",
    )

    @field_validator("temperature", "top_p", mode="before")
    @classmethod
    def _default_for_null(cls, value: object) -> object:
        return 1.0 if value is None else value


class ChatRequest(SampledRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """conversation so far"""
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    """sampled tokens, at most"""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """newer name of max_tokens"""
    seed: int | None = None
    """seed of sampling"""
    tools: list[ToolDefinition] | None = Field(default=None, max_length=128, fail_fast=True)
    """functions of the client"""
    tool_choice: Any = None
    """choice of tools: auto or none"""
    stop: list[str] | None = Field(default=None, fail_fast=True)
    """strings that end the answer, a list of up to four or a single string"""
    logprobs: bool | None = None
    """request for the log-probability of each sampled token"""
    top_logprobs: int | None = None
    """number of likeliest tokens per position, 0 to 20; needs logprobs"""
    return_token_ids: bool | None = None
    """request for `prompt_token_ids`, and for `token_ids` of the choice, as in vLLM"""

    @property
    def offered_tools(self) -> list[ToolDefinition]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @field_validator("stop", mode="before")
    @classmethod
    def _list_of_one(cls, stop: object) -> object:
        return [stop] if isinstance(stop, str) else stop


class LikelyToken(Wire):
    """One token of a position's distribution, in OpenAI's format."""

    token: str
    logprob: float = Field(description="natural log, under the distribution that was sampled from")
    bytes: list[int]


class TokenLogprob(LikelyToken):
    """One sampled token."""

    top_logprobs: list[LikelyToken]
    """likeliest tokens first; fewer than asked for where fewer could be sampled"""


class AgentSessionRequest(Wire):
    """POST /v1/agent/sessions: a known repository, and the user's files that replace its own."""

    repository: str
    """name of a repository of the gateway, or id of one that the tenant sent"""
    message: str = Field(min_length=1)
    """request of the user"""
    files: Uploads = Field(default_factory=dict)
    """text by path of the files that differ in the user's copy"""
    test_ids: list[str] | None = Field(default=None, fail_fast=True)
    """tests that `pytest` runs in this session; null: every test of the repository"""
    problem_kind: Name = Field(default="agent", min_length=1, max_length=80)
    """kind of task, by which feedback baselines are kept"""
    seed: int | None = Field(
        default=None, description="seed of sampling; null: drawn from the interaction's id"
    )
    store: bool | None = Field(
        default=None,
        description="permission to store the session; false withdraws the tenant's consent for it",
    )


class AgentMessageRequest(Wire):
    """POST /v1/agent/sessions/{id}/messages: a follow-up in the state the agent left."""

    message: str = Field(min_length=1)
    """next request of the user"""
    files: Uploads = Field(default_factory=dict, description="files that the user changed since")
    seed: int | None = None
    """seed of sampling"""
    store: bool | None = Field(
        default=None,
        description="permission to store the message; false withdraws the consent for the rest of the "
        "session, because its turns contain the message",
    )


class RepositoryAnswer(Wire):
    """A repository that the tenant has sent."""

    id: str = Field(description="name that `repository` of a session takes")
    object: Literal["repository"] = "repository"
    bytes: int = Field(description="disk that counts against the tenant's quota")
    files: int
    created_at: int
    expires_at: int
    """seconds since 1970; each session that uses the repository restarts the period"""
    package_paths: list[str]
    """folders guessed from their names to hold product code"""
    test_paths: list[str]
    """folders and files guessed to hold tests, which `pytest` runs"""


class RepositoryList(Wire):
    """Repositories that a tenant has sent."""

    object: Literal["list"] = "list"
    data: list[RepositoryAnswer]


class Usage(Wire):
    """Tokens of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AgentAnswer(Wire):
    """Result of an agent attempt."""

    session_id: str
    """session to follow up in"""
    interaction_id: str
    """id that feedback names"""
    status: str
    """finished, turn_limit, token_limit, broken_calls, timed_out, box_ruined, fault, sandbox_failed or
    engine_failed"""
    detail: str
    """text of the error when the attempt failed"""
    warning: str = Field(
        default="",
        description="why no test can be run, or plug-ins that some tests miss; empty: neither",
    )
    final_message: str
    """closing message of the agent"""
    diff: str = Field(
        description="unified diff against the files the user had when the session began"
    )
    changed_files: dict[str, str | None]
    """whole text of each changed file by path; null: removed"""
    turns: int
    tool_calls: int
    latency_seconds: float
    usage: Usage


class FeedbackRequest(Wire):
    """POST /v1/feedback."""

    interaction_id: Name
    """id of an answer in any API; of an agent session its `interaction_id`"""
    signal: ClientSignal
    """reaction of the user"""
    value: float = Field(default=1.0, ge=0, le=1, description="share from 0 to 1, or 1 for yes")
    feedback_id: FeedbackId | None = None
    """id of the signal: a repeated one changes nothing; null: a signal counts once per interaction"""


class FeedbackAnswer(Wire):
    """Receipt of a feedback signal."""

    stored: bool
    """whether the signal was kept; false without the tenant's consent"""
    feedback_id: str
    """id under which it was kept"""


class ErrorDetail(Wire):
    """A refusal or a fault in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Wire):
    """Body of every answer with a status of 400 or more."""

    error: ErrorDetail
