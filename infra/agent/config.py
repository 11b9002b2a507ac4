"""Settings and request of an agent attempt.

`HarnessConfig` (the same for every attempt of a run), `ToolPolicy` (restrictions of one environment),
`PromptFacts` and `AgentRequest` (one attempt).
"""

from typing import Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from ostinato.infra.agent.extensions import COMPACT, DIALECTS, TOOLS
from ostinato.infra.agent.tools.names import EDIT_FILE, WRITE_FILE
from ostinato.infra.agent.transcript import Opening
from ostinato.infra.platform.record import Record
from ostinato.models.decode.protocol import Priority
from ostinato.models.rendering.vocabulary import TOOL_NAMES

SHORTEST_RESULT_CHARACTERS = 100
EditForm = Literal["tool", "whole_function", "search_replace", "udiff"]


class ToolPolicy(Record):
    """Restrictions of an environment. A refused call is an InvalidArguments result."""

    tools: tuple[str, ...] | None = None
    """names of the config's tools that may be called; None: all of them"""
    exact_edits: bool = False
    """whether edit_file's old must match to the character"""
    read_before_edit: bool = False
    """whether edit_file and write_file refuse a file whose present content was not read"""
    protected_paths: tuple[str, ...] = ()
    """patterns as in .gitignore that no file tool may change"""
    allowed_commands: tuple[str, ...] | None = None
    """first words that a terminal command may have; None: any"""


class HarnessConfig(Record):
    """Limits and tool set. Training, evaluation and users share one."""

    tools: tuple[str, ...] = TOOL_NAMES
    """tools the model may call, the whole list; by default all built-in tools of the dialect"""
    max_turns: PositiveInt = Field(
        default=8, description="answers of the model per attempt, at most"
    )
    max_generated_tokens: PositiveInt = 320
    """sampled tokens per attempt, at most"""
    context_tokens: int = Field(default=512, ge=16)
    """tokens of prompt, answers and results together, at most"""
    max_broken_turns: PositiveInt = 3
    """turns in a row with only malformed, unknown or invalid calls after which the attempt ends"""
    max_calls_per_turn: PositiveInt = 16
    """calls per answer that are run; further ones are refused as invalid"""
    call_time_limit_seconds: PositiveFloat = 20.0
    """wall time per call, after which it is stopped and the model reads that it ran too long"""
    attempt_time_limit_seconds: PositiveFloat = 300.0
    """wall time per attempt, after which it ends with the files as they are. A gateway that is stopped
    waits as long for those under way"""
    result_limit_characters: int = Field(default=1200, ge=80)
    """characters per tool result; longer results are cut in the middle"""
    read_limit_lines: PositiveInt = Field(
        default=40, description="lines that one read_file may show"
    )
    search: Literal["words", "encoder"] = "words"
    """ranking of codebase_search: by words alone, or also by the vectors of the encoder that [retrieval]
    trains"""
    place_tags: bool = False
    """line tags before each place that grep and codebase_search name; read_file takes a tag for the
    function there"""
    summarise_at_tokens: int | None = None
    """context length from which a summary is asked for; None: never"""
    max_summaries: NonNegativeInt = 4
    """summaries per attempt, at most; 0: none"""
    max_restarts: NonNegativeInt = 0
    """times an attempt may start over of its own accord: an answer without a call that begins with 'Start
    over:' restores the files it edited, and the context begins anew with the request and that answer"""
    dialect: str = COMPACT
    """call format the template was trained with: compact, full, one of published models (`ostinato import`
    says which) or an installed one"""
    edits: EditForm = "tool"
    """form of edits: calls of edit_file and write_file, or instead of them blocks in a plain answer: whole
    functions, search and replace, unified diffs. Only tool in the compact dialect"""
    policy: ToolPolicy = ToolPolicy()
    """rules for environments that have none of their own"""
    turn_limit_characters: int | None = None
    """characters of all results of a turn together; None: no further limit"""
    summary_limit_tokens: PositiveInt | None = None
    """tokens per summary, at most; None: all that the budgets leave"""
    system_prompt: str | None = None
    """text that replaces the explanation of tools and calls, for a model that was fine-tuned on them; None:
    the explanation"""
    shown_lines: NonNegativeInt = 0
    """lines of a problem's broken function shown above its prompt as a file that the user has open, at
    most; 0: none. Not in the compact dialect"""
    announce_turns: NonNegativeInt = 0
    """number of turns left at which the model is told so; 0: never"""
    announce_tokens: NonNegativeInt = 0
    """number of tokens left at which the model is told so; 0: never"""
    infrastructure_retries: NonNegativeInt = 2
    """retries of a call that failed through infrastructure"""

    @field_validator("dialect")
    @classmethod
    def _known_dialect(cls, dialect: str) -> str:
        DIALECTS.refuse_unknown([dialect])
        return dialect

    @model_validator(mode="after")
    def _consistent(self) -> "HarnessConfig":
        is_compact = self.dialect == COMPACT
        outside = [tool for tool in self.enabled_names if tool not in TOOL_NAMES]
        if is_compact and outside:
            raise ValueError(
                f"tool is {outside[0]!r}, wanted one of the compact dialect, whose tool names are "
                f"token ids: {', '.join(TOOL_NAMES)}; other tools want dialect = 'full'"
            )
        TOOLS.refuse_unknown(outside)
        if self.place_tags and not is_compact:
            raise ValueError("place_tags is true, wanted false: only the compact dialect has tags")
        if is_compact and (self.shown_lines or self.system_prompt is not None):
            raise ValueError(
                "shown_lines or system_prompt is set, wanted neither in the compact dialect: its "
                "prompts are the request alone"
            )
        if is_compact and self.edits != "tool":
            raise ValueError(f"edits is {self.edits!r}, wanted 'tool' in the compact dialect")
        shortest = SHORTEST_RESULT_CHARACTERS * self.max_calls_per_turn
        if self.turn_limit_characters is not None and self.turn_limit_characters < shortest:
            raise ValueError(
                f"turn_limit_characters is {self.turn_limit_characters}, wanted at least "
                f"{shortest}: {SHORTEST_RESULT_CHARACTERS} for each of max_calls_per_turn"
            )
        trigger, summary = self.summarise_at_tokens, self.summary_limit_tokens
        if trigger is not None and summary is not None and trigger + summary > self.context_tokens:
            raise ValueError(
                f"summarise_at_tokens + summary_limit_tokens is {trigger + summary}, wanted at "
                f"most context_tokens, {self.context_tokens}"
            )
        return self

    @property
    def enabled_names(self) -> tuple[str, ...]:
        """The tools by name. Unless some are named, a plain-text dialect has all built-in ones."""
        if self.dialect != COMPACT and self.tools == TOOL_NAMES:
            return tuple(TOOLS.built_in)
        if self.edits == "tool":
            return self.tools
        return tuple(dict.fromkeys((*self.tools, EDIT_FILE, WRITE_FILE)))  # what blocks become


class RecentFile(Record):
    """A stretch of a file the user has looked at or changed lately."""

    path: str
    first_line: PositiveInt = 1
    text: str


class PromptFacts(Record):
    """Facts for the system prompt and first message beside tools and task. Equal facts give equal bytes."""

    directory: str = "/repo"
    platform: str = "Linux"
    date: str = Field(
        default="", description="ISO date of the prompt; empty: the prompt names none"
    )
    rules: str = Field(default="", description="the repository's own rules for agents")
    recent_files: tuple[RecentFile, ...] = ()


class AgentRequest(Record):
    """Request for one attempt."""

    prompt: str
    session_id: str = Field(description="name of the conversation in the engine's cache")
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    priority: Priority = Priority.TRAINING
    system_prompt: str | None = None
    """text of the system message; None: the dialect's own, of which the compact dialect has none"""
    earlier_token_ids: tuple[int, ...] = ()
    """tokens of the conversation so far; the prompt is appended to them"""
    opening: Opening | None = None
    """turns of another attempt that this one continues from; they count as its own"""
    return_routes: bool = True
    facts: PromptFacts = PromptFacts()
