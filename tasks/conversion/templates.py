"""Chat template of an imported model: its own, one that the user names, or a default.

Our templates: `chatml` ends messages with `<|im_end|>`; `plain` marks roles with words and ends
answers with the model's end of text. A chosen template stays with the model and says so in its
first line.
"""

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer

from ostinato.infra.platform.bounded_files import read_bounded
from ostinato.infra.platform.errors import ConfigError
from ostinato.models.rendering.chat_template import (
    CHOSEN,
    TEMPLATE_FILE,
    TemplateRenderer,
    find_template,
)
from ostinato.models.rendering.special_tokens import (
    CONFIG,
    GENERATION,
    SPECIAL_MAP,
    TOKENIZER_SETTINGS,
    published_ends,
    token_text,
    tokenizer_settings,
    with_ends,
)
from ostinato.models.rendering.template_environment import template_environment

MAX_TEMPLATE_BYTES = 1 << 20
BODY = Path(__file__).with_name("chat.jinja")
CHATML, PLAIN = "chatml", "plain"
_FORMS = {
    CHATML: r"'<|im_start|>', '\n', '<|im_end|>\n', '<|im_end|>\n'",
    PLAIN: r"'### ', ':\n', '\n\n', eos_token + '\n\n'",
}
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_SPECIAL = ("bos_token", "eos_token")
FIX = "import it with --chat-template chatml, plain or a file"


def choose_template(
    files: dict[str, bytes], config: dict[str, Any], tokenizer: Tokenizer, wanted: str | None
) -> tuple[dict[str, bytes], str]:
    """The model's small files with the chosen template, and a line about it for the user. Raises
    ConfigError for a `wanted` template that cannot hold a conversation.
    """
    placed = files | {CONFIG: json.dumps(config).encode()}
    try:
        published_ends(placed, tokenizer.get_vocab_size())
        published = find_template(files)
        settings = _complete_settings(files, config, tokenizer)
    except ValueError as error:
        raise ConfigError(f"special tokens or the chat template cannot be read: {error}") from None
    if wanted is None and published is not None:
        return _judge(files, config, tokenizer, published)
    name = wanted or _default(settings, tokenizer)
    if name is None:
        return files, f"none, and no eos_token to end an answer with: {FIX}"
    template = _read(name, settings, tokenizer)
    settings.pop("chat_template", None)
    changed = files | {
        TEMPLATE_FILE: template.encode(),
        TOKENIZER_SETTINGS: json.dumps(settings, indent=1, ensure_ascii=False).encode(),
    }
    changed.pop("chat_template.json", None)
    try:
        renderer = TemplateRenderer(tokenizer, template, settings, placed)
    except ValueError as error:
        if wanted is None:
            return files, f"none: {error}"
        raise ConfigError(f"--chat-template {name}: {error}") from None
    why = "as asked for" if wanted else "the model came without one"
    return with_ends(changed, config, renderer.stop_token_ids), f"{name}, {why}"


def _judge(
    files: dict[str, bytes], config: dict[str, Any], tokenizer: Tokenizer, template: str
) -> tuple[dict[str, bytes], str]:
    """The files, and a line about whether the model's own template can be used."""
    placed = files | {CONFIG: json.dumps(config).encode()}
    try:
        renderer = TemplateRenderer(tokenizer, template, tokenizer_settings(files), placed)
    except ValueError as error:
        return files, f"its own, which is refused: {error}; {FIX}"
    line = "its own"
    if renderer.drops_thoughts:
        line += (
            "; it removes <think> blocks from answers before the last question, here they are kept"
        )
    return with_ends(files, config, renderer.stop_token_ids), line


def _default(settings: dict[str, Any], tokenizer: Tokenizer) -> str | None:
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    if added.issuperset(_CHATML_TOKENS):
        return CHATML
    return PLAIN if settings.get("eos_token") else None


def _read(name: str, settings: dict[str, Any], tokenizer: Tokenizer) -> str:
    form = _FORMS.get(name)
    if form is None:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                f"--chat-template {name!r} is no file, wanted one or {' or '.join(_FORMS)}"
            )
        try:
            text = read_bounded(path, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"--chat-template {name} is not UTF-8: {error}") from None
        check_syntax(f"--chat-template {name}", text)
        return text
    if name == PLAIN and not settings.get("eos_token"):
        raise ConfigError(
            "--chat-template plain ends answers with eos_token, and the model has none"
        )
    begin = token_text(settings.get("bos_token"))
    first = tokenizer.encode("").tokens[:1]
    opening = "{{- bos_token }}" if begin and first == [begin] else ""
    head = f"{CHOSEN} {name} -#}}\n{{%- set opens, names, ends, ends_answer = {form} %}}\n{opening}"
    return head + BODY.read_text(encoding="utf-8")


def check_syntax(what: str, template: str) -> None:
    """Raises ConfigError for a template that does not parse. `what`: its name, for the error."""
    try:
        template_environment().parse(template)
    except RecursionError:
        raise ConfigError(f"{what} is nested too deep") from None
    except TemplateSyntaxError as error:
        raise ConfigError(f"{what} does not parse, line {error.lineno}: {error.message}") from None
    except ValueError as error:  # such as a number with thousands of digits
        raise ConfigError(f"{what} does not parse: {error}") from None


def _complete_settings(
    files: dict[str, bytes], config: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The tokenizer's settings with bos and eos, which some models name in other files."""
    settings = json.loads(files.get(TOKENIZER_SETTINGS, b"{}"))
    special = json.loads(files.get(SPECIAL_MAP, b"{}"))
    generation = json.loads(files.get(GENERATION, b"{}"))
    for name in _SPECIAL:
        ids = generation.get(f"{name}_id") or config.get(f"{name}_id")
        token_id = ids[0] if isinstance(ids, list) and ids else ids
        by_id = None
        if isinstance(token_id, int) and 0 <= token_id < tokenizer.get_vocab_size():
            by_id = tokenizer.id_to_token(token_id)
        found = settings.get(name) or special.get(name) or by_id
        if found and tokenizer.token_to_id(token_text(found)) is not None:
            settings[name] = found
    return settings
