"""A tool as one object: its arguments with kinds and bounds, the resources of a call, and its function.

Schemas, system prompt (loop/prompts.py) and the checks of a call's arguments are all made from
these definitions, so they cannot differ.
"""

import json
import posixpath
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment

FILES = "files"
REGION = "region"
REPOSITORY_PREFIXES = ("/repo/", "./")

FILE = "files/{path}"  # the file in a call's path argument
Values = Mapping[str, Any]
"""Arguments by name, converted to the kinds of their definitions."""
Output = str | Callable[[], str]
"""Text that the model reads; a callable is called once the turn's other calls have run."""
Implementation = Callable[[AgentEnvironment, Any, HarnessConfig], Awaitable[Output]]
Kind = Literal["line", "text", "path", "integer", "boolean", "choice", "list", "json"]
Value = Any
"""Text, an integer, a boolean or a tuple of texts; for a json argument any JSON value."""
_BOOLEANS = {"true": True, "false": False}
_SCHEMA_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "boolean": bool,
    "list": list,
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. `text` and `json` keep surrounding white space. Values of other kinds are stripped."""

    name: str
    description: str
    is_required: bool = True
    kind: Kind = "line"
    minimum: int | None = None  # of an integer; of a list: entries
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""  # each entry of a list must match it
    declared: Mapping[str, Any] | None = None  # JSON schema of a json argument

    @property
    def is_text(self) -> bool:
        """Whether white space around the value counts."""
        return self.kind in ("text", "json")

    @property
    def schema_types(self) -> tuple[str, ...]:
        """Types that the schema of a json argument allows. Empty: any."""
        declared = self.declared or {}
        forms = declared.get("anyOf") or declared.get("oneOf")
        forms = forms if isinstance(forms, list) else [declared]
        types = [form.get("type") for form in forms if isinstance(form, Mapping)]
        flat = [name for each in types for name in (each if isinstance(each, list) else [each])]
        named = tuple(name for name in flat if isinstance(name, str) and name in _SCHEMA_TYPES)
        return named if len(named) == len(flat) else ()

    @property
    def wanted(self) -> str:
        """Description of a valid value."""
        if self.kind == "integer":
            return f"an integer {_bounds(self.minimum, self.maximum)}"
        if self.kind == "boolean":
            return "true or false"
        if self.kind == "choice":
            return f"one of {', '.join(self.choices)}"
        if self.kind == "path":
            return "a path inside the repository"
        if self.kind == "list":
            return f"{_bounds(self.minimum, self.maximum)} entries".replace("any", "any number of")
        if self.kind == "json":
            return f"JSON, {' or '.join(self.schema_types) or 'any value'}"
        return "text"

    def convert(self, raw: str) -> Value:
        """The typed value of an argument's text. The message of ValueError is the valid form."""
        raw = raw if self.is_text else raw.strip()
        if self.kind == "integer":
            return self._integer(raw)
        if self.kind == "boolean" and raw in _BOOLEANS:
            return _BOOLEANS[raw]
        if self.kind == "path":
            return normalize_path(raw)
        if self.kind == "list":
            return self._list(raw)
        if self.kind == "json":
            return self._json(raw)
        if self.kind == "boolean" or (self.kind == "choice" and raw not in self.choices):
            raise ValueError(self.wanted)
        return raw

    def _integer(self, raw: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", raw):
            raise ValueError(self.wanted)
        value = int(raw)
        too_small = self.minimum is not None and value < self.minimum
        if too_small or (self.maximum is not None and value > self.maximum):
            raise ValueError(self.wanted)
        return value

    def _json(self, raw: str) -> Value:
        """The JSON value of `raw`, or else its text. ValueError for a type that the schema forbids."""
        types = self.schema_types
        if types == ("string",):
            return raw
        try:
            value = json.loads(raw.lower() if raw in ("True", "False", "None") else raw)
        except (ValueError, RecursionError):
            value = raw
        if types and not any(_has_type(value, name) for name in types):
            raise ValueError(self.wanted)
        return value

    def _list(self, raw: str) -> tuple[str, ...]:
        entries = tuple(line.strip() for line in raw.split("\n") if line.strip())
        too_few = self.minimum is not None and len(entries) < self.minimum
        if too_few or (self.maximum is not None and len(entries) > self.maximum):
            raise ValueError(self.wanted)
        for entry in entries:
            if self.pattern and not re.fullmatch(self.pattern, entry):
                raise ValueError(f"entries like {self.pattern}, not {entry[:60]!r}")
        return entries

    def schema(self) -> dict[str, Any]:
        described: dict[str, Any] = {"description": self.description}
        if self.kind == "json":
            return {**(self.declared or {})} | (described if self.description else {})
        if self.kind == "integer":
            bounds = {"minimum": self.minimum, "maximum": self.maximum}
            described |= {"type": "integer"}
            return described | {key: value for key, value in bounds.items() if value is not None}
        if self.kind == "boolean":
            return {"type": "boolean"} | described
        if self.kind == "choice":
            return {"type": "string", "enum": list(self.choices)} | described
        if self.kind == "list":
            items = {"type": "string"} | ({"pattern": f"^{self.pattern}$"} if self.pattern else {})
            bounds = {"minItems": self.minimum, "maxItems": self.maximum}
            described |= {"type": "array", "items": items}
            return described | {key: value for key, value in bounds.items() if value is not None}
        return {"type": "string"} | described


def optional(name: str, description: str, kind: Kind = "line", **bounds: Any) -> Argument:
    """An argument that a call may leave out. `bounds`: minimum, maximum, choices."""
    return Argument(name, description, is_required=False, kind=kind, **bounds)


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of the agent.

    `run` gets the environment, the values and the harness settings. It raises ToolFailure with a
    message for the model and ToolRefusal if a policy forbids the call. `reads` and `writes` name
    resources: "files/{path}" is the file in the path argument, "files" are all; calls that
    conflict run in order. `rule` checks the values together and returns an error or an empty text.
    """

    name: str
    description: str
    arguments: tuple[Argument, ...]
    run: Implementation
    primary: str = ""  # in the compact dialect: may be written bare, after the others
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    rule: Callable[[Mapping[str, Value]], str] | None = None
    schema: Mapping[str, Any] | None = None  # of all arguments, for a tool declared elsewhere

    @property
    def edits_files(self) -> bool:
        """Whether a call changes the file that it names."""
        return FILE in self.writes

    def argument(self, name: str) -> Argument | None:
        """The argument called `name`, or None."""
        return next((argument for argument in self.arguments if argument.name == name), None)


def declared_tool(
    name: str,
    description: str,
    schema: Mapping[str, Any],
    run: Implementation,
    resource: str,
) -> Tool:
    """A tool that is declared elsewhere by the JSON schema of its arguments. Its calls run one after another, and
    never at the same time as a call that touches files.
    """
    required = schema.get("required") or ()
    arguments = tuple(
        Argument(
            key,
            str(form.get("description", "")),
            is_required=key in required,
            kind="json",
            declared=form,
        )
        for key, form in (schema.get("properties") or {}).items()
        if isinstance(form, Mapping)
    )
    return Tool(name, description, arguments, run, writes=(FILES, resource), schema=schema)


def tool(
    description: str,
    *arguments: Argument,
    primary: str = "",
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    rule: Callable[[Mapping[str, Value]], str] | None = None,
) -> Callable[[Implementation], Tool]:
    """Decorator that makes a function the tool of its name."""
    return lambda run: Tool(run.__name__, description, arguments, run, primary, reads, writes, rule)


@dataclass(frozen=True, slots=True)
class Checked:
    """Typed values, or an error that names the fault."""

    values: dict[str, Value]
    error: str = ""


def check_arguments(tool: Tool, arguments: Mapping[str, str]) -> Checked:
    """The arguments as typed values, or the first that is unknown, wrong, empty or missing."""
    values: dict[str, Value] = {}
    for name, raw in arguments.items():
        argument = tool.argument(name)
        if argument is None:
            known = ", ".join(each.name for each in tool.arguments)
            return Checked({}, f"{tool.name} has no argument {name[:60]!r}, wanted {known}")
        try:
            values[name] = argument.convert(raw)
        except ValueError as error:
            return Checked({}, f"{tool.name}.{name} is {raw[:60]!r}, wanted {error}")
        if argument.is_required and not argument.is_text and values[name] in ("", ()):
            return Checked({}, f"{tool.name}.{name} is empty")
    for argument in tool.arguments:
        if argument.is_required and argument.name not in values:
            return Checked({}, f"{tool.name}.{argument.name} is missing")
    error = tool.rule(values) if tool.rule is not None else ""
    return Checked({}, f"{tool.name}: {error}") if error else Checked(values)


def strings_from_json(tool: Tool, arguments: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """JSON arguments as the strings a model would write, and an error when a type is not the schema's."""
    strings: dict[str, str] = {}
    for name, value in arguments.items():
        argument = tool.argument(name)
        kind = argument.kind if argument is not None else "line"
        if argument is not None and kind == "json" and argument.schema_types != ("string",):
            strings[name] = json.dumps(value, ensure_ascii=False)
            continue
        wanted = _JSON_TYPES.get(kind, str)
        is_right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
        if isinstance(value, list) and is_right:
            is_right = all(isinstance(entry, str) and "\n" not in entry for entry in value)
        if not is_right:
            what = argument.wanted if argument is not None else "text"
            return {}, f"{tool.name}.{name[:60]} is {str(value)[:60]!r}, wanted {what}"
        if isinstance(value, bool):
            strings[name] = "true" if value else "false"
        else:
            strings[name] = "\n".join(value) if isinstance(value, list) else str(value)
    return strings, ""


def tool_schemas(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools as OpenAI-style function schemas."""
    schemas: list[dict[str, Any]] = []
    for tool in tools:
        parameters = {
            "type": "object",
            "properties": {argument.name: argument.schema() for argument in tool.arguments},
            "required": [argument.name for argument in tool.arguments if argument.is_required],
            "additionalProperties": False,
        }
        if tool.schema is not None:
            parameters = dict(tool.schema) or {"type": "object", "properties": {}}
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    return schemas


def normalize_path(path: str) -> str:
    """Normalised path relative to the repository, "" for the root. ValueError outside of it."""
    path = path.strip()
    for prefix in REPOSITORY_PREFIXES:
        path = path.removeprefix(prefix)
    if path in ("", "/repo"):
        return ""
    normal = posixpath.normpath(path)
    if normal.startswith(("/", "../")) or normal == ".." or "\0" in path or "\n" in path:
        raise ValueError("a path inside the repository")
    return "" if normal == "." else normal


def resources(tool: Tool, arguments: Mapping[str, str]) -> tuple[frozenset[str], frozenset[str]]:
    """Resources that a call reads and writes. Every spelling of a path is the same resource."""
    try:
        path = normalize_path(arguments.get("path", "").split(":", 1)[0])
    except ValueError:
        path = ""  # the call will fail; until then it counts as all files

    def fill(names: tuple[str, ...]) -> frozenset[str]:
        # A call without a path depends on the file read last, so it counts as all files.
        return frozenset(
            (f"{FILES}/{path}" if path else FILES) if name == FILE else name for name in names
        )

    return fill(tool.reads), fill(tool.writes)


def covers(resource: str, other: str) -> bool:
    """Whether two resources overlap: equal, or one the directory of the other."""
    return resource == other or resource.startswith(other + "/") or other.startswith(resource + "/")


def _has_type(value: Any, name: str) -> bool:
    """Whether a value has a type of JSON schemas, where booleans are not numbers."""
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _SCHEMA_TYPES[name])


def _bounds(minimum: int | None, maximum: int | None) -> str:
    if minimum is not None and maximum is not None:
        return f"{minimum} to {maximum}"
    if minimum is not None:
        return f"at least {minimum}"
    return f"at most {maximum}" if maximum is not None else "any"
