"""A template that behaves as Qwen3's does: thoughts before the last question are taken out of the history."""

from tokenizers import AddedToken, Tokenizer

from tests.fakes.published_model import small_tokenizer

# The last answer of all shows its thoughts, empty ones too; a message of tool results is no question.
THINKING_TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set last = namespace(question=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set words = m.content or '' %}
    {%- if m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + words + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if '</think>' in words %}
            {%- set thoughts = words.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set words = words.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > last.question and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
    {%- endif %}
    {{- words }}
    {%- for call in m.tool_calls or [] %}
        {%- if words or not loop.first %}
            {{- '\\n' }}
        {%- endif %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def thinking_tokenizer() -> Tokenizer:
    """As Qwen3's: its tags are added tokens, but no special ones."""
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer
