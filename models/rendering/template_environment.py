"""The Jinja in which published chat templates are written, as transformers offers it."""

import json
from datetime import date
from typing import Any, ClassVar

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The day in every prompt, so that prompts are the same on all days and a replay is exact: the one
# that Llama 3's templates name where they are told none.
_TODAY = date(2024, 7, 26)


class _AnswerMark(Extension):
    """The block `generation`, by which some templates mark answers. Its text stays as it is."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> ImmutableSandboxedEnvironment:
    """Extensions, filters and functions that templates find in transformers. Their day is fixed."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _AnswerMark],
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _TODAY.strftime}
    environment.filters["tojson"] = _to_json
    return environment


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
