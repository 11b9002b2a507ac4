"""Chat templates in the formats that published models were trained on, each as short as the format allows.

Ours, written from the makers' documents; what a form says of tools, calls and results is theirs.
"""

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from ostinato.models.rendering.chat_template import TemplateRenderer
from tests.fakes.published_model import small_tokenizer


@dataclass(frozen=True)
class PublishedTemplate:
    """A template, its special tokens, and the one that ends an answer."""

    text: str
    tokens: tuple[str, ...]
    end: str

    def renderer(self) -> TemplateRenderer:
        tokenizer: Tokenizer = small_tokenizer()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in self.tokens])
        return TemplateRenderer(tokenizer, self.text, {"eos_token": self.end})


_CHATML = ("<|im_start|>", "<|im_end|>")
_TOOLS = "{% if tools %}{opens}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{closes}{% endif %}"


def _stated(opens: str, closes: str) -> str:
    return _TOOLS.replace("{opens}", opens).replace("{closes}", closes)


def _qwen(calls: str, opens: str, closes: str) -> str:
    """Qwen's: results are questions, those of one turn in one message."""
    return (
        _stated("<|im_start|>system\n# Tools\n", "<|im_end|>\n")
        + """{% for m in messages %}{% if m.role == 'tool' %}
{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}

<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}"""
        + calls
        + """{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    )


HERMES = PublishedTemplate(
    _qwen(
        '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
        "</tool_call>",
        "",
        "",
    ),
    _CHATML,
    "<|im_end|>",
)
TEMPLATES = {"hermes": HERMES}
