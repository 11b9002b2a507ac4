"""Texts of the harness: system prompt, first message, summary request, notes.

Made from tool definitions, policy and facts alone: equal inputs give equal bytes.
"""

import json
from collections.abc import Iterable

from ostinato.infra.agent.config import HarnessConfig, PromptFacts, ToolPolicy
from ostinato.infra.agent.dialects.dialect import dialect_of
from ostinato.infra.agent.dialects.edits.blocks import GUIDES, REMINDERS
from ostinato.infra.agent.environment import HarnessState
from ostinato.infra.agent.tools.definition import Argument, Tool, tool_schemas

SUMMARY_REQUEST = "Summarise what was done and what remains."
START_OVER = "Start over:"
SUMMARY_INSTRUCTION = (
    "The context is nearly full. Write a summary of what you know, did and decided, and what "
    "remains; you go on from the summary alone. Call no tool in this answer."
)


def write_system_prompt(
    tools: Iterable[Tool],
    config: HarnessConfig,
    policy: ToolPolicy,
    facts: PromptFacts,
    *,
    states_tools: bool = False,
) -> str:
    """The system message of a dialect that is explained: the config's own, or the explanation.
    `states_tools`: the chat template or a server states the tools and how to call them.
    """
    if config.system_prompt is not None:
        return config.system_prompt
    tools = tuple(tools)
    means, end = ("with tools ", " and no tool call") if tools else ("", "")
    parts = [
        f"You are a coding agent. You work on a repository {means}until the user's request is "
        f"done, then answer with a short final message{end}.",
        _describe_place(facts),
        *([_describe_calls(config, states_tools=states_tools)] if tools else []),
        *([] if config.edits == "tool" else [f"# Edits\n{GUIDES[config.edits]}"]),
        *([] if states_tools or not tools else _describe_tools(tools, config)),
        _describe_conduct(policy, has_tools=bool(tools)),
    ]
    if config.max_restarts:
        parts.append(
            f"# Starting over\nAn answer without calls that begins with '{START_OVER}' puts the files "
            "you edited back and begins again with the request and that answer: say what you learned."
        )
    if facts.rules.strip():
        parts.append(f"# Rules of this repository\n{facts.rules.strip()}")
    return "\n\n".join(parts)


def explain_tools(tools: Iterable[Tool], config: HarnessConfig) -> str:
    """Explanation of calls and tools, for a prompt that is written elsewhere."""
    return "\n\n".join(
        [_describe_calls(config, states_tools=False), *_describe_tools(tools, config)]
    )


def write_first_message(prompt: str, facts: PromptFacts, config: HarnessConfig) -> str:
    """The user's message, after recently viewed files and before the form of edits: small models follow what they
    read last.
    """
    if config.edits != "tool" and config.system_prompt is None:
        prompt = f"{prompt}\n\n{REMINDERS[config.edits]}"
    if not facts.recent_files:
        return prompt
    shown = "\n\n".join(
        f"{file.path} (from line {file.first_line})\n{file.text.rstrip()}"
        for file in facts.recent_files
    )
    return f"Recently viewed files:\n\n{shown}\n\nRequest:\n{prompt}"


def write_continuation(
    prompt: str, summary: str, state: HarnessState, num_summaries: int, config: HarnessConfig
) -> str:
    """The first message of the segment after a summary: request, summary, state of the work."""
    if not dialect_of(config).is_explained:
        return f"{prompt}\n\n{summary}"
    parts = [prompt, f"Your summary of the work so far ({num_summaries} so far):\n{summary}"]
    if state.todo:
        parts.append(f"Your to-do list:\n{state.todo}")
    if state.originals:
        parts.append("Files you changed: " + ", ".join(sorted(state.originals)))
    return "\n\n".join(parts)


def summary_request(config: HarnessConfig) -> str:
    return SUMMARY_INSTRUCTION if dialect_of(config).is_explained else SUMMARY_REQUEST


def budget_note(config: HarnessConfig, turns_left: int, tokens_left: int) -> str | None:
    """Note on the remaining budget, once little is left. None before."""
    few_turns = 0 < turns_left <= config.announce_turns
    few_tokens = 0 < tokens_left <= config.announce_tokens
    if not few_turns and not few_tokens:
        return None
    turns = f"{turns_left} turn{'s' if turns_left != 1 else ''}"
    return f"{turns} and {tokens_left} tokens left: finish what matters and answer."


def _describe_tools(tools: Iterable[Tool], config: HarnessConfig) -> list[str]:
    """Descriptions of tools in words, or as JSON schemas for published models."""
    if not dialect_of(config).is_published:
        return ["# Tools", *(describe_tool(tool) for tool in tools)]
    return ["# Tools", "\n".join(json.dumps(schema) for schema in tool_schemas(tools))]


def describe_tool(tool: Tool) -> str:
    lines = [f"## {tool.name}", tool.description]
    return "\n".join([*lines, *(_describe_argument(argument) for argument in tool.arguments)])


def _describe_argument(argument: Argument) -> str:
    kind = {"line": "text", "list": "lines"}.get(argument.kind, argument.kind)
    if argument.kind == "json":
        kind = "text" if argument.schema_types == ("string",) else _declared(argument)
    details = [kind, "required" if argument.is_required else "optional"]
    if argument.kind in ("integer", "choice"):
        details.insert(1, argument.wanted.removeprefix("an integer "))
    return f"- {argument.name} ({', '.join(details)}): {argument.description}"


def _declared(argument: Argument) -> str:
    """The JSON schema of a value, without its description, which is shown elsewhere."""
    declared = argument.declared or {}
    shown = {key: value for key, value in declared.items() if key != "description"}
    return f"JSON of {json.dumps(shown, ensure_ascii=False)}"


def _describe_place(facts: PromptFacts) -> str:
    lines = [f"Working directory: {facts.directory}", f"Platform: {facts.platform}"]
    if facts.date:
        lines.append(f"Date: {facts.date}")
    return "\n".join(lines)


def _describe_calls(config: HarnessConfig, *, states_tools: bool) -> str:
    dialect = dialect_of(config)
    guide = "# Calls\n" if states_tools else f"# Calls\n{dialect.guide}\n"
    if not dialect.several_calls:
        return f"{guide}One call may stand in one answer."
    return (
        f"{guide}Up to {config.max_calls_per_turn} calls may stand in one answer. They run at the same "
        "time unless one changes what another uses; results come in the order of the calls. Put "
        "calls that do not need each other's results into one answer."
    )


def _describe_conduct(policy: ToolPolicy, *, has_tools: bool) -> str:
    look = "- Look before you change; run the tests or check your work before you finish."
    lines = [
        "# Conduct",
        *([look] if has_tools else []),
        "- Change only what the request needs. Do not edit tests unless asked.",
        "- Ask the user only what the repository cannot answer.",
    ]
    if policy.read_before_edit:
        lines.append("- Read a file before you change it.")
    if policy.exact_edits:
        lines.append("- The old text of an edit must match to the character.")
    if policy.protected_paths:
        lines.append("- These may not be changed: " + ", ".join(policy.protected_paths))
    if policy.allowed_commands is not None:
        allowed = ", ".join(policy.allowed_commands) or "none"
        lines.append(f"- Only these terminal commands run: {allowed}")
    return "\n".join(lines)
