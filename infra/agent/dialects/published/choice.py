"""The dialect that a chat template was written for, chosen at import and stored with the template."""

# ruff: noqa: RUF001
import json
import re
from pathlib import Path

from ostinato.infra.agent.extensions import FULL
from ostinato.models.rendering.chat_template import PUBLISHED

DIALECT_FILE = "dialect.json"
_MARKERS = (
    (r"<\|channel\|>", "harmony"),
    (r"<\|tool_call_argument_begin\|>", "kimi_k2"),
    (r"<｜tool▁sep｜>(?:(?!```).)*```json", "deepseek_v3"),
    ("<｜tool▁sep｜>", "deepseek_v31"),
    (r"\[TOOL_CALLS\]", "mistral"),
    ("<arg_key>", "glm4"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    (r'<\|python_tag\|>|"name": .{0,80}"parameters": ', "llama3"),
)
"""Marks in templates, tried in this order because some templates also hold the mark of a later dialect."""


def find_dialect(template: str) -> str | None:
    """The dialect of the calls that a chat template writes. None if no known dialect matches."""
    return next((name for mark, name in _MARKERS if re.search(mark, template, re.DOTALL)), None)


def write_choice(dialect: str) -> bytes:
    """The file that keeps a choice, which `read_choice` reads."""
    return json.dumps({"dialect": dialect}).encode()


def read_choice(checkpoint: Path) -> str:
    """The dialect of an imported checkpoint, or of one trained from it. full if the import chose none."""
    path = checkpoint / PUBLISHED / DIALECT_FILE
    return json.loads(path.read_bytes())["dialect"] if path.is_file() else FULL
