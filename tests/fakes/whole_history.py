"""Conversations as their template writes them in one go, to compare with those that grew."""

import jinja2

from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.models.rendering.chat_template import TemplateRenderer
from tests.fakes.published_model import TEMPLATE, TOOL_TEMPLATE, small_tokenizer

# Results of one turn are parts of one user message.
MERGING_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<result>{{ m.content }}</result>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": TEMPLATE,
    "with tools": TOOL_TEMPLATE,
    "no newlines": TEMPLATE.replace("<|im_end|>\n", "<|im_end|>"),
    "two newlines": TEMPLATE.replace("\n", "\n\n"),
    "merged results": MERGING_TEMPLATE,
    "no header": TEMPLATE.replace("{% if add_generation_prompt %}", "{% if false %}").replace(
        "<|im_start|>{{ message['role'] }}\n",
        "{% if message.role != 'assistant' %}<|im_start|>{{ message.role }}\n{% endif %}",
    ),
}
SETTINGS = {"eos_token": "<|im_end|>"}
RENDERERS: dict[str, Renderer] = {
    "nano": Renderer(train_tokenizer(["def add(a, b):\n    return a + b\n"], vocab_size=400)),
    **{
        name: TemplateRenderer(small_tokenizer(), template, SETTINGS)
        for name, template in TEMPLATES.items()
    },
}
USER, ASSISTANT, TOOL = (
    {"role": role, "content": f"{role} says add"} for role in ("user", "assistant", "tool")
)
HISTORIES = [
    [USER, ASSISTANT, TOOL],
    [USER, ASSISTANT, TOOL, USER],
    [USER, ASSISTANT, TOOL, TOOL, USER],
    [USER, ASSISTANT, TOOL, USER, ASSISTANT, TOOL, USER, ASSISTANT, USER],
]


def whole_tokens(name: str, history: list[dict[str, str]]) -> list[int]:
    """Tokens of a whole history and the header of the next answer."""
    renderer = RENDERERS[name]
    if name in TEMPLATES:
        template = jinja2.Environment(trim_blocks=True).from_string(TEMPLATES[name])
        text = template.render(messages=history, add_generation_prompt=True)
        return small_tokenizer().encode(text, add_special_tokens=False).ids
    tokens: list[int] = []
    for message in [*history, None]:
        role = "assistant" if message is None else message["role"]
        opening = renderer.tokenizer.token_to_id(f"<|{role}|>")
        assert opening is not None
        tokens.append(opening)
        if message is not None:
            tokens += [*renderer.encode_content(message["content"]), renderer.end_id]
    return tokens
