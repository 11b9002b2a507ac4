"""Chat templates in the formats that published models were trained on, each as short as the format allows.

Ours, written from the makers' documents; what a form says of tools, calls and results is theirs.
"""
# ruff: noqa: RUF001

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


def _qwen(calls: str) -> str:
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
        "</tool_call>"
    ),
    _CHATML,
    "<|im_end|>",
)
QWEN3_CODER = PublishedTemplate(
    _qwen(
        "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
        "<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson if v is mapping or v is sequence else v | string }}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    _CHATML,
    "<|im_end|>",
)
# A result is JSON, and one call is all that an answer may hold.
LLAMA3 = PublishedTemplate(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if tools and loop.first %}Functions:\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
    "<|eot_id|>",
)


def _deepseek(call: str) -> str:
    """DeepSeek's: no tools are stated, arguments are texts, and no header stands behind results."""
    return (
        "{% set ns = namespace(tool=false) %}{% for m in messages %}"
        "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "{% set ns.tool = false %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'tool' %}{% if not ns.tool %}<｜tool▁outputs▁begin｜>{% endif %}"
        "{% set ns.tool = true %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}"
        "{% elif m.tool_calls %}{{ '' if ns.tool else '<｜Assistant｜>' }}{{ m.content }}<｜tool▁calls▁begin｜>"
        "{% for c in m.tool_calls %}"
        + call
        + "{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "{% else %}{{ '' if ns.tool else '<｜Assistant｜>' }}{{ m.content }}<｜end▁of▁sentence｜>{% endif %}"
        "{% endfor %}{% if add_generation_prompt and not ns.tool %}<｜Assistant｜>{% endif %}"
    )


_DEEPSEEK_TOKENS = (
    *(
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
    *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
DEEPSEEK_V3 = PublishedTemplate(
    _deepseek(
        "{{ '' if loop.first else '\n' }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n"
        "```json\n{{ '' + c.function.arguments }}\n```<｜tool▁call▁end｜>"
    ),
    _DEEPSEEK_TOKENS,
    "<｜end▁of▁sentence｜>",
)
DEEPSEEK_V31 = PublishedTemplate(
    _deepseek(
        "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ '' + c.function.arguments }}<｜tool▁call▁end｜>"
    ),
    _DEEPSEEK_TOKENS,
    "<｜end▁of▁sentence｜>",
)
KIMI_K2 = PublishedTemplate(
    _stated("<|im_system|>tool_declare<|im_middle|>", "<|im_end|>")
    + "{% for m in messages %}{% if m.role == 'tool' %}<|im_system|>tool<|im_middle|>"
    "## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
    (
        *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "<|im_end|>",
)
# Ids of nine letters, results as JSON with them, and no header behind results.
MISTRAL = PublishedTemplate(
    _stated("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
    + "{% for m in messages %}{% if m.role in ('user', 'system') %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ '' if loop.first else ', ' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    (
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "</s>",
    ),
    "</s>",
)
TEMPLATES = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3": LLAMA3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
    "mistral": MISTRAL,
}

# Two forms whose templates do not hold conversations here: GLM's answers end with the next message's role,
# gpt-oss writes an answer's end otherwise once a message follows.
GLM4_CALL = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
)
HARMONY_CALL = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}"
    "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}{% endfor %}"
)
