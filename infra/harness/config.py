"""What an attempt is asked to do and the limits it runs under.

Owns `HarnessConfig` (the same for every attempt of a run) and `AgentRequest` (one attempt). Plain
values in, no behaviour.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from models.decode.protocol import Priority
from models.rendering.vocabulary import TOOL_NAMES


class HarnessConfig(BaseModel):
    """Limits and tool set; training, evaluation and users share one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tools: tuple[str, ...] = Field(default=TOOL_NAMES, description="tools the model may call")
    max_turns: int = Field(default=8, ge=1, description="answers of the model in one attempt")
    max_generated_tokens: int = Field(
        default=320, ge=1, description="sampled tokens in one attempt"
    )
    context_tokens: int = Field(
        default=512, ge=16, description="prompt, answers and results together"
    )
    max_broken_turns: int = Field(
        default=3, ge=1, description="turns in a row whose calls are all the model's own mistakes"
    )
    max_calls_per_turn: int = Field(default=16, ge=1)
    call_time_limit_seconds: float = Field(default=20.0, gt=0)
    attempt_time_limit_seconds: float = Field(default=300.0, gt=0)
    result_limit_characters: int = Field(
        default=1200, ge=80, description="longer tool results are cut in the middle"
    )
    read_limit_lines: int = Field(default=40, ge=1, description="lines one read_file may show")
    line_numbers: Literal["tags", "plain"] = Field(
        default="tags", description="<L3> in front of shown lines (line edits possible), or '3: '"
    )
    summarise_at_tokens: int | None = Field(
        default=None, description="context length that asks for a summary; None: never"
    )
    max_summaries: int = Field(default=4, ge=0)

    @field_validator("tools")
    @classmethod
    def _known_tools(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        for tool in tools:
            if tool not in TOOL_NAMES:
                raise ValueError(f"tool is {tool!r}, wanted one of {', '.join(TOOL_NAMES)}")
        return tools


class AgentRequest(BaseModel):
    """One attempt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str
    session_id: str = Field(description="names the conversation to the engine's cache")
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    priority: Priority = Priority.TRAINING
    system_prompt: str | None = None
    earlier_token_ids: tuple[int, ...] = Field(
        default=(), description="tokens of the conversation so far; the prompt is appended to them"
    )
    return_routes: bool = True
