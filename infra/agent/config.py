"""Settings and request of an agent attempt.

`HarnessConfig` (the same for every attempt of a run), `ToolPolicy` (restrictions of one environment),
`PromptFacts` and `AgentRequest` (one attempt).
"""

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from ostinato.infra.agent.extensions import BUILTIN, COMMAND, COMPACT, DIALECTS, HARNESSES, TOOLS
from ostinato.infra.agent.harnesses import HarnessCommand
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
    """whether edit_file and write_file refuse a file until its present content was read"""
    protected_paths: tuple[str, ...] = ()
    """patterns as in .gitignore that no file tool may change"""
    allowed_commands: tuple[str, ...] | None = None
    """first words that a terminal command may have; None: any"""


class HarnessConfig(Record):
    """Limits and tool set. Training, evaluation and users share one."""

    program: str = BUILTIN
    """agent that makes the attempts: builtin; a third-party agent that runs in the attempt's box (mini_swe_agent ...,
    or an installed one); or command: the program of [harness.command]. The limits of turns, tokens and time apply to
    every agent; agents other than builtin have their own tools, edits, summaries and prompts"""
    command: HarnessCommand | None = None
    """the program, if program is command"""
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
    waits this long for attempts under way"""
    result_limit_characters: int = Field(default=1200, ge=80)
    """characters per tool result; longer results are cut in the middle"""
    read_limit_lines: PositiveInt = Field(
        default=40, description="lines that one read_file may show"
    )
    search: Literal["words", "encoder"] = "words"
    """ranking of codebase_search: by words alone, or also by the vectors of the encoder that [retrieval]
    trains"""
    place_tags: bool = False
    """line tags before each place that grep and codebase_search name; read_file accepts a tag for the
    function at that place"""
    summarise_at_tokens: int | None = None
    """context length from which a summary is asked for; None: never"""
    max_summaries: NonNegativeInt = 4
    """summaries per attempt, at most; 0: none"""
    max_restarts: NonNegativeInt = 0
    """times the model may start an attempt over: an answer without a call that begins with 'Start over:' restores
    the files that the attempt edited, and a new context begins with the request and that answer"""
    dialect: Annotated[str, AfterValidator(DIALECTS.known)] = COMPACT
    """call format that the model was trained with: compact, full, that of a published model (`ostinato import`
    says which) or an installed one"""
    edits: EditForm = "tool"
    """form of edits: tool (calls of edit_file and write_file), or blocks in a plain answer instead: whole
    functions, search and replace, or unified diffs. The compact dialect has only tool"""
    policy: ToolPolicy = ToolPolicy()
    """tool policy for environments without their own"""
    turn_limit_characters: int | None = None
    """characters of all results of a turn together; None: no further limit"""
    summary_limit_tokens: PositiveInt | None = None
    """tokens per summary, at most; None: only the attempt's budgets limit it"""
    system_prompt: str | None = None
    """text that replaces the explanation of tools and calls, for a model that was fine-tuned on them; None:
    the explanation"""
    shown_lines: NonNegativeInt = 0
    """lines of a problem's broken function, at most, that are shown above its prompt as a file that the user has
    open; 0: none. Not in the compact dialect"""
    announce_turns: NonNegativeInt = 0
    """number of remaining turns from which on the model is told its remaining budget; 0: never"""
    announce_tokens: NonNegativeInt = 0
    """number of remaining tokens from which on the model is told its remaining budget; 0: never"""
    mcp_servers: dict[str, str] = Field(default={})
    """MCP servers that run in the box of each attempt, by name: the command line that speaks the protocol on
    stdin and stdout. Their tools join the model's as NAME__TOOL. Not in the compact dialect"""
    infrastructure_retries: NonNegativeInt = 2
    """retries of a call after an infrastructure fault"""

    @field_validator("program")
    @classmethod
    def _known_program(cls, program: str) -> str:
        if program not in (BUILTIN, COMMAND):
            HARNESSES.refuse_unknown([program])
        return program

    @model_validator(mode="after")
    def _program_or_command(self) -> "HarnessConfig":
        if (self.program == COMMAND) != (self.command is not None):
            raise ValueError(
                f"program is {self.program!r} with {'a' if self.command else 'no'} table "
                "[harness.command], wanted program = 'command' with one, another without"
            )
        return self

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
        if is_compact and self.mcp_servers:
            raise ValueError(
                f"mcp_servers is {sorted(self.mcp_servers)}, wanted none in the compact dialect, whose "
                "tool names are token ids; other tools want dialect = 'full' or a published one"
            )
        if self.mcp_servers and not self.is_builtin:
            raise ValueError(
                f"mcp_servers is {sorted(self.mcp_servers)} with program {self.program!r}, wanted none: a "
                "program has tools of its own"
            )
        for name in self.mcp_servers:
            if re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name) is None or name in TOOLS.names:
                raise ValueError(
                    f"mcp_servers names {name!r}, wanted a name of a-z, 0-9 and _ that no tool has"
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
    def is_builtin(self) -> bool:
        """Whether the builtin loop makes the attempts."""
        return self.program == BUILTIN

    def foreign_program(self) -> HarnessCommand:
        """The program that makes the attempts instead of the builtin loop."""
        return self.command if self.command is not None else HARNESSES.load(self.program)

    @property
    def enabled_names(self) -> tuple[str, ...]:
        """Names of the enabled tools. A plain-text dialect with the default `tools` has all built-in ones."""
        if self.dialect != COMPACT and self.tools == TOOL_NAMES:
            return tuple(TOOLS.built_in)
        if self.edits == "tool":
            return self.tools
        # edit blocks become calls of these two
        return tuple(dict.fromkeys((*self.tools, EDIT_FILE, WRITE_FILE)))


class RecentFile(Record):
    """Lines of a file that the user viewed or changed recently."""

    path: str
    first_line: PositiveInt = 1
    text: str


class PromptFacts(Record):
    """Facts for the system prompt and first message. Equal facts give equal bytes."""

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
    """text of the system message; None: the dialect's own, which the compact dialect lacks"""
    earlier_token_ids: tuple[int, ...] = ()
    """tokens of the conversation so far; the prompt is appended to them"""
    opening: Opening | None = None
    """turns of another attempt that this one continues from; they count as its own"""
    return_routes: bool = True
    facts: PromptFacts = PromptFacts()
