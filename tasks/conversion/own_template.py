"""The chat template of our own tokens, for engines that read the export of a model of ours.

It writes what `Renderer` encodes. Contents with the text of a token that `Renderer` takes as text there
are refused: a template has no means to say so.
"""

import json
from pathlib import Path

from ostinato.infra.agent.dialects.compact.tools import TOOLS
from ostinato.models.rendering.vocabulary import CALL_TAGS, CONTROL_TOKENS, LINE_TAGS

BODY = Path(__file__).with_name("own_tokens.jinja")


def write_own_template() -> str:
    """The template, with the tokens and tools of today."""
    words = {
        "system": (*CONTROL_TOKENS, *CALL_TAGS, *LINE_TAGS),
        "user": (*CONTROL_TOKENS, *CALL_TAGS, *LINE_TAGS),
        "tool": (*CONTROL_TOKENS, *CALL_TAGS),
        "assistant": CONTROL_TOKENS,
    }
    bare_arguments = {name: tool.primary for name, tool in TOOLS.items()}
    tables = {"words": words, "bare_arguments": bare_arguments}
    heads = [f"{{%- set {name} = {json.dumps(table)} %}}\n" for name, table in tables.items()]
    return "".join(heads) + BODY.read_text(encoding="utf-8")
