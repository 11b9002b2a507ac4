"""Jinja environment of published chat templates, with the functions that transformers offers.

Templates are untrusted, so they run in a separate process, which runs this file. CPU time, memory
and length are bounded for each text.
"""

import atexit
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import date
from functools import lru_cache
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Date in every prompt, so that prompts do not depend on the day and a replay is exact. It is the
# default date of Llama 3's templates.
_TODAY = date(2024, 7, 26)
_MAX_SECONDS, _MAX_MEMORY_BYTES, _MAX_CHARACTERS = 3, 1 << 30, 64 << 20  # of one text


class _TemplateProcess:
    """Child process that renders templates. It starts with the first text, and again if it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: str) -> str:
        """The line that answers a request line. Empty if the process died."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    (sys.executable, "-I", __file__), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, env={}, text=True, start_new_session=True,
                )  # fmt: skip
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(f"{request}\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if not answer.endswith("\n"):
                self.end()
            return answer

    def end(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_process = _TemplateProcess()
atexit.register(_process.end)
os.register_at_fork(after_in_child=_process.__init__)  # its pipes are the parent's


def render_template(template: str, names: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """Renders a template with named tokens and values. Raises TemplateError if it fails or exceeds
    a bound.
    """
    answer = _process.ask(json.dumps([template, names, values]))
    if not answer.endswith("\n"):
        raise TemplateError(
            f"it takes more than {_MAX_SECONDS} s of CPU time or {_MAX_MEMORY_BYTES >> 20} MiB for one text"
        )
    text, fault = json.loads(answer)
    if fault:
        raise TemplateError(fault)
    return text


@lru_cache(maxsize=64)
def _compile(template: str, names: str) -> Template:
    return template_environment().from_string(template, globals=json.loads(names))


def _answer(template: str, names: Mapping[str, str], values: Mapping[str, Any]) -> tuple[str, str]:
    """(text, error). One of them is empty."""
    try:
        text = _compile(template, json.dumps(names)).render(values)
    except TemplateError as error:
        return "", str(error) or type(error).__name__
    except MemoryError:
        return "", f"it takes more than {_MAX_MEMORY_BYTES >> 20} MiB of memory for one text"
    except Exception as error:  # noqa: BLE001 an untrusted template may raise anything
        return "", f"{type(error).__name__}: {str(error)[:2000]}"
    if len(text) > _MAX_CHARACTERS:
        return "", f"it writes {len(text)} characters, wanted at most {_MAX_CHARACTERS}"
    return text, ""


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + _MAX_SECONDS, hard))
        sys.stdout.write(json.dumps(_answer(*json.loads(line))) + "\n")
        sys.stdout.flush()


class _AnswerMark(Extension):
    """The block `generation`, with which some templates mark answers. Its text is kept unchanged."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> ImmutableSandboxedEnvironment:
    """Environment with the extensions, filters and functions of transformers, and a fixed date."""
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


if __name__ == "__main__":
    _main()
