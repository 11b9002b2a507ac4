"""A dialect: the format in which a model writes calls, and the tools it may name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from ostinato.infra.agent.config import HarnessConfig, ToolPolicy
from ostinato.infra.agent.dialects.spans import FindCalls, no_calls
from ostinato.infra.agent.extensions import DIALECTS, TOOLS
from ostinato.infra.agent.tools.calls import ParsedAnswer
from ostinato.infra.agent.tools.definition import Tool
from ostinato.infra.agent.tools.names import EDIT_FILE, WRITE_FILE

_NONE: Mapping[str, Tool] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Dialect:
    """Call format of one family of chat templates."""

    parse: Callable[[str, Mapping[str, Tool]], ParsedAnswer]
    """Calls and prose of an answer; the mapping holds the tools that may be called."""
    guide: str = ""
    """How a call is written, for the system prompt. Empty: the model knows the format by its
    tokens, so it gets no system prompt, and results carry no call ids."""
    write: Callable[[str, Mapping[str, str]], str] | None = None
    """A call as a model writes it, for demonstrations. None: there are no demonstrations."""
    find_calls: FindCalls = no_calls
    """Whole calls of any tool in a text. Thought marks in their arguments do not count as the answer's."""
    is_published: bool = False
    """Whether published models were trained on the form. The chat template, or a server, then states
    the tools and writes results."""
    several_calls: bool = True
    """Whether one answer may hold several calls."""
    tools: Mapping[str, Tool] | None = None
    """A closed set of tools; None: tools of the group ostinato.tools, as the settings name them."""

    @property
    def is_explained(self) -> bool:
        """Whether a system prompt explains tools and calls."""
        return bool(self.guide)


def dialect_of(config: HarnessConfig) -> Dialect:
    """The dialect of the harness settings."""
    return _load_dialect(config.dialect)


def catalogue_of(config: HarnessConfig) -> Mapping[str, Tool]:
    """The tools of the harness settings, in their order."""
    return _load_tools(config.dialect, config.enabled_names)


@cache
def _load_dialect(name: str) -> Dialect:
    return DIALECTS.load(name)


@cache
def _load_tools(dialect: str, names: tuple[str, ...]) -> Mapping[str, Tool]:
    closed = _load_dialect(dialect).tools
    return {name: TOOLS.load(name) if closed is None else closed[name] for name in names}


def offered_tools(
    config: HarnessConfig, policy: ToolPolicy, own: Mapping[str, Tool] = _NONE
) -> dict[str, Tool]:
    """The tools that the model sees: those it may call, except those that edit blocks replace."""
    hidden = () if config.edits == "tool" else (EDIT_FILE, WRITE_FILE)
    tools = enabled_tools(config, policy, own).items()
    return {name: tool for name, tool in tools if name not in hidden}


def enabled_tools(
    config: HarnessConfig, policy: ToolPolicy, own: Mapping[str, Tool] = _NONE
) -> dict[str, Tool]:
    """The tools that may run in an attempt under this policy. `own`: tools of its environment."""
    return {
        name: tool
        for name, tool in {**catalogue_of(config), **own}.items()
        if policy.tools is None or name in policy.tools
    }
