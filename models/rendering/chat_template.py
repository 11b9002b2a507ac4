"""Conversations of a published model: its own tokenizer and its own chat template.

Tokens sampled are the tokens trained here too: a further message adds the template's difference
behind the model's own tokens. A template that rewrites what came before is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders

from ostinato.models.rendering.renderer import TOKENIZER_FILE, Renderer, Tags, byte_characters

PUBLISHED = "published"
Message = dict[str, str]
# Tokens that templates may name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Stand in for contents when the template is asked for its form.
QUESTION, ANSWER, RESULT = "\u2402question\u2403", "\u2402answer\u2403", "\u2402result\u2403"
TOOL_NAME = "example_tool"
MARK = "0mark0"  # survives whatever a template does to contents: JSON, trimming


class TemplateRenderer(Renderer):
    """Turns messages into tokens by a published chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        settings: dict[str, Any],
        files: dict[str, bytes] | None = None,
    ) -> None:
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise ValueError(
                f"tokenizer has the decoder {tokenizer.decoder}, wanted ByteLevel: only its tokens "
                "are bytes of the text"
            )
        self.tokenizer = tokenizer
        self._files = files or {}
        self._lock = Lock()  # the tokenizer reads special tokens or not by a state of its own
        self.vocab_size = tokenizer.get_vocab_size()
        names = {name: _token_text(settings.get(name)) for name in _NAMED_TOKENS}
        known = {name: text for name, text in names.items() if text}
        self._template = template_environment().from_string(template, globals=known)
        self.end_id = self._check_form()
        eos_id = tokenizer.token_to_id(names["eos_token"]) if names["eos_token"] else None
        self.end_of_text_id = self.end_id if eos_id is None else eos_id
        self.pad_id = self.end_of_text_id
        self.stop_token_ids = tuple(sorted({self.end_id, self.end_of_text_id}))
        self._result_role = self._find_result_role()

    @classmethod
    def load(cls, path: Path) -> "TemplateRenderer":
        """Reads an imported checkpoint. ValueError when it came without a template."""
        folder = path / PUBLISHED
        files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        settings = json.loads(files.get("tokenizer_config.json", b"{}"))
        template = find_template(files)
        if template is None:
            raise ValueError(f"{folder} holds no chat template, wanted one to hold a conversation")
        return cls(Tokenizer.from_file(str(path / TOKENIZER_FILE)), template, settings, files)

    def save(self, directory: Path) -> Path:
        """Writes `tokenizer.json` into `directory`, and the published files below it."""
        path = super().save(directory)
        for name, content in self._files.items():
            (directory / PUBLISHED).mkdir(exist_ok=True)
            (directory / PUBLISHED / name).write_bytes(content)
        return path

    def encode_content(self, text: str, tags: Tags = "none") -> list[int]:
        """Tokens of `text`, none of them special. `tags` are nano's: here they are plain text."""
        return self._tokens(text, special_tokens=False)

    def start(
        self, user: str, system: str | None = None, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Opens a conversation: system message if any, user's message, the answer's header. `tools` are
        stated by the template, where it states any.
        """
        written = json.dumps(list(tools), ensure_ascii=False)
        special = next((special for special in self._special_texts if special in written), None)
        if special is not None:
            raise ValueError(
                f"a tool's definition holds {special!r}, wanted none of the model's tokens"
            )
        messages = [] if system is None else [{"role": "system", "content": system}]
        return self._encode([*messages, {"role": "user", "content": user}], after="", tools=tools)

    def append_user(self, text: str) -> list[int]:
        """A further user message and the header of the answer to it."""
        return self._append([{"role": "user", "content": text}])

    def append_results(self, results: Sequence[str], note: str | None = None) -> list[int]:
        """The tool results of a turn in call order, a note of the harness if any, and the next header."""
        messages = [{"role": self._result_role, "content": result} for result in results]
        return self._append(
            messages + ([] if note is None else [{"role": "user", "content": note}])
        )

    def _append(self, messages: list[Message]) -> list[int]:
        ids = self._encode([*_opening(), *messages], after=ANSWER)
        assert ids[0] == self.end_id  # which the model sampled itself
        return ids[1:]

    def _encode(
        self, messages: list[Message], after: str, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Tokens of the template's text behind `after`. Contents yield no special token, however the
        template writes them: rendered again with a mark inside theirs, only the template's are whole.
        """
        text = self._show(messages, after, tools)
        found = [self._specials.search(message["content"]) for message in messages]
        first = next((match for match in found if match is not None), None)
        if first is None:
            return self._encode_form(text)
        mark = MARK
        while mark in text or any(mark in message["content"] for message in messages):
            mark += MARK
        broken = [
            message | {"content": self._special_starts.sub(rf"\g<0>{mark}", message["content"])}
            for message in messages
        ]
        marked = self._show(broken, after, tools)
        if marked.replace(mark, "") != text:
            raise ValueError(
                f"the chat template rewrites contents that hold {first[0]!r}, wanted them kept whole"
            )
        ids: list[int] = []
        form = ""
        for piece in self._specials.split(marked):
            if mark in piece:
                ids += self._encode_form(form) + self.encode_content(piece.replace(mark, ""))
                form = ""
            else:
                form += piece
        return ids + self._encode_form(form)

    def _show(self, messages: list[Message], after: str, tools: Sequence[dict[str, Any]]) -> str:
        """The template's text behind `after`. ValueError for messages that it refuses."""
        try:
            text = self._render(messages, opens_answer=True, tools=tools)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return text[text.index(after) + len(after) :]

    def _encode_form(self, text: str) -> list[int]:
        return self._tokens(text, special_tokens=True)

    def _tokens(self, text: str, *, special_tokens: bool) -> list[int]:
        with self._lock:
            self.tokenizer.encode_special_tokens = not special_tokens
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        return tuple(token.content for token in self.tokenizer.get_added_tokens_decoder().values())

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        """A special token's text, the longest that fits."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("(" + ("|".join(map(re.escape, texts)) or "(?!)") + ")")

    @cached_property
    def _special_starts(self) -> re.Pattern[str]:
        """The first character of each such text, also of one that overlaps another."""
        return re.compile(f"(?={self._specials.pattern}).", re.DOTALL)

    @cached_property
    def states_tools(self) -> bool:
        """Whether the template states tools, with calls as JSON between `<tool_call>` tags."""
        function = {"name": TOOL_NAME, "description": "", "parameters": {"type": "object"}}
        call = {"type": "function", "function": {"name": TOOL_NAME, "arguments": {}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        tools = [{"type": "function", "function": function}]
        try:
            stated = self._render(_opening()[:1], opens_answer=True, tools=tools)
            called = self._render([_opening()[0], answer], opens_answer=False)
        except TemplateError:
            return False
        return TOOL_NAME in stated and f'<tool_call>\n{{"name": "{TOOL_NAME}"' in called

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        opens_answer: bool,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        return self._template.render(
            messages=messages,
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=opens_answer,
        )

    def _check_form(self) -> int:
        """The token that ends an answer. ValueError when the template rewrites history."""
        try:
            opened = self._render(_opening()[:1], opens_answer=True)
            closed = self._render(_opening(), opens_answer=False)
            further = self._render([*_opening(), _opening()[0]], opens_answer=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses a plain conversation: {error}") from None
        if not closed.startswith(opened + ANSWER):
            raise ValueError(
                "the chat template writes an answer elsewhere than behind its header: "
                f"{closed!r} does not begin with {opened!r} and the answer"
            )
        ending = self._encode_form(closed[len(opened) + len(ANSWER) :])
        is_kept = further.startswith(opened + ANSWER)
        behind = self._encode_form(further[len(opened) + len(ANSWER) :])
        if not is_kept or not ending or ending[0] != behind[0]:
            raise ValueError(
                "the chat template rewrites history: after a further message the conversation no "
                f"longer begins with {opened + ANSWER!r} and its end, but is {further!r}"
            )
        return ending[0]

    @cached_property
    def _header_ids(self) -> list[int]:
        """The header, and before it what stands behind an answer's end: there messages are appended."""
        told = self._render(_opening()[:1], opens_answer=False)
        opened = self._render(_opening()[:1], opens_answer=True)
        closed = self._render(_opening(), opens_answer=False)
        header = opened[len(told) :] if opened.startswith(told) else ""
        return self._encode_form(closed[len(opened) + len(ANSWER) :] + header)[1:]

    def _find_result_role(self) -> str:
        """`tool` where the template shows such a message, else `user`."""
        try:
            shown = self._render(
                [*_opening(), {"role": "tool", "content": RESULT}], opens_answer=True
            )
        except TemplateError:
            return "user"
        return "tool" if RESULT in shown else "user"

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        byte_of = {character: value for value, character in byte_characters().items()}
        added = self.tokenizer.get_added_tokens_decoder()
        ids = self.tokenizer.get_vocab()
        table = [b""] * (max(ids.values()) + 1)  # some tokenizers skip ids
        for token, token_id in ids.items():
            if token_id in added:
                table[token_id] = added[token_id].content.encode()
            else:
                table[token_id] = bytes(byte_of[character] for character in token)
        return table


class _AnswerMark(Extension):
    """The block `generation`, by which some templates mark answers. Its text stays as it is."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> ImmutableSandboxedEnvironment:
    """Extensions, filters and functions that templates find in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _AnswerMark],
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    environment.filters["tojson"] = _to_json
    return environment


def load_renderer(path: Path) -> Renderer:
    """The renderer of a checkpoint directory: by its published template, else by our own tokens."""
    if path.is_dir() and (path / PUBLISHED).is_dir():
        return TemplateRenderer.load(path)
    return Renderer.load(path)


def find_template(files: dict[str, bytes]) -> str | None:
    """The template: of its own file, else of the tokenizer's configuration."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = json.loads(files.get(name, b"{}")).get("chat_template")
        if isinstance(found, str):
            return found
        if isinstance(found, list):  # several by name
            return next((item["template"] for item in found if item["name"] == "default"), None)
    return None


def _opening() -> list[Message]:
    return [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token or ""


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


def _now(form: str) -> str:
    return datetime.now().strftime(form)
