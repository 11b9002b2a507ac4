"""Conversations in the tokenizer and chat template of a published model.

The tokens sampled are the tokens trained: a further message appends the template's additional text
after the model's own tokens. A template that rewrites history is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders

from ostinato.models.rendering.call_results import (
    EXAMPLE_TOOL,
    QUESTION,
    RESULT,
    TOOL_NAME,
    CallResults,
    Message,
    NamedCall,
    example_call,
    find_call_results,
)
from ostinato.models.rendering.control_texts import ControlTexts, choose_mark
from ostinato.models.rendering.renderer import TOKENIZER_FILE, Renderer, Tags, byte_characters
from ostinato.models.rendering.special_tokens import (
    TOKENIZER_SETTINGS,
    published_ends,
    token_text,
    tokenizer_settings,
)
from ostinato.models.rendering.template_environment import render_template

PUBLISHED = "published"
TEMPLATE_FILE = "chat_template.jinja"
# Prefix of a template that is not the model's own.
CHOSEN = "{#- Ostinato gave this model the chat template"
# Tokens that templates may name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Placeholders of contents when a template's form is probed.
ANSWER = "\u2402answer\u2403"
_SPACE, _BYTE_PIECE = "\u2581", re.compile(r"<0x([0-9A-F]{2})>")  # of SentencePiece
THOUGHT = "\u2402thought\u2403"


class TemplateRenderer(Renderer):
    """Turns messages into tokens by a published chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        settings: dict[str, Any],
        files: dict[str, bytes] | None = None,
    ) -> None:
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        if not self._is_byte_level and not _has_byte_fallback(tokenizer):
            raise ValueError(
                f"tokenizer has the decoder {tokenizer.decoder}, wanted ByteLevel, or BPE with ByteFallback: "
                "only their tokens are bytes of the text"
            )
        self.tokenizer = _without_batch_settings(tokenizer)
        self._files = files or {}
        self._texts = ControlTexts(tokenizer)
        self.vocab_size = tokenizer.get_vocab_size()
        names = {name: token_text(settings.get(name)) for name in _NAMED_TOKENS}
        self._names = {name: text for name, text in names.items() if text}
        self.is_chosen = template.startswith(CHOSEN)  # not the model's own: it has yet to learn it
        self.template = template
        self.end_id = self._check_form()
        eos_id = tokenizer.token_to_id(names["eos_token"]) if names["eos_token"] else None
        self.end_of_text_id = self.end_id if eos_id is None else eos_id
        self.pad_id = self.end_of_text_id
        ends = {self.end_id, self.end_of_text_id, *published_ends(self._files, self.vocab_size)}
        self.stop_token_ids = tuple(sorted(ends))
        self._result_role = self._find_result_role()

    @classmethod
    def load(cls, path: Path) -> "TemplateRenderer":
        """Reads an imported checkpoint. Raises ValueError if it has no template."""
        folder = path / PUBLISHED
        files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        settings = tokenizer_settings(files)
        template = find_template(files)
        if template is None:
            raise ValueError(
                f"{folder} holds no chat template, wanted one to hold a conversation; import the model "
                "again with --chat-template chatml, plain or a file"
            )
        return cls(Tokenizer.from_file(str(path / TOKENIZER_FILE)), template, settings, files)

    def save(self, directory: Path) -> Path:
        """Writes `tokenizer.json` into `directory`, and the published files below it."""
        path = super().save(directory)
        for name, content in self._files.items():
            (directory / PUBLISHED).mkdir(exist_ok=True)
            (directory / PUBLISHED / name).write_bytes(content)
        return path

    def encode_content(self, text: str, tags: Tags = "none") -> list[int]:
        """Tokens of `text` without control tokens. nano's tags are plain text here, whatever `tags` is."""
        return self._texts.encode_content(text)

    def encode_answer(self, text: str) -> list[int]:
        """Tokens of an answer as the model would sample it: tags as their tokens, no special tokens."""
        return [*self._texts.encode_answer(text), self.end_id]

    def is_control(self, token_id: int) -> bool:
        """Whether a token was added for the form of conversations."""
        return self._texts.is_control(token_id)

    def start(
        self, user: str, system: str | None = None, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Tokens that open a conversation: system message if any, user's message, the answer's
        header, and `tools` if the template states tools.
        """
        messages = [] if system is None else [{"role": "system", "content": system}]
        return self._encode([*messages, {"role": "user", "content": user}], after="", tools=tools)

    def append_user(self, text: str) -> list[int]:
        """Tokens of a further user message and the header of the answer to it."""
        return self._append([{"role": "user", "content": text}])

    def append_results(
        self, results: Sequence[str], note: str | None = None, calls: Sequence[NamedCall] = ()
    ) -> list[int]:
        """Tokens of a turn's tool results in call order, a note of the harness if any, and the next
        header. `calls`: the answered calls, if the model wrote them in its template's form.
        """
        form = self._call_results if calls else None
        if form is not None:
            calls, before = form.before_results(calls, self._texts.find)
            return self._encode(form.messages(calls, results, note), after=before)
        notes = [] if note is None else [{"role": "user", "content": note}]
        messages = [{"role": self._result_role, "content": result} for result in results]
        return self._append(messages + notes)

    def _append(self, messages: list[Message]) -> list[int]:
        ids = self._encode([*_opening(), *messages], after=ANSWER)
        assert ids[0] == self.end_id  # which the model sampled itself
        return ids[1:]

    def _encode(
        self, messages: list[Message], after: str, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Tokens of the template's text after the first occurrence of `after`."""
        marked, marked_tools, mark = self.mark_contents(messages, tools)
        text = self.show(marked, marked_tools, opens_answer=True)
        return self._texts.encode_form(text[text.index(after) + len(after) :], mark)

    def mark_contents(
        self, messages: list[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[Message], list[dict[str, Any]], str | None]:
        """Messages and tools with a mark before each control text, and the mark. In the rendered
        text, control texts without a mark are then the template's own. Raises ValueError if the
        template does not keep a marked text whole. The mark is None if it is not needed.
        """
        shown = self.show(messages, tools, opens_answer=True)
        mark = choose_mark(shown)
        marked = [self._texts.mark_contents(message, mark) for message in messages]
        marked_tools = [self._texts.mark_contents(tool, mark) for tool in tools]
        if marked == messages and marked_tools == list(tools):
            _check_all_shown(messages, shown)
            return messages, list(tools), None
        if self.show(marked, marked_tools, opens_answer=True).replace(mark, "") != shown:
            found = self._texts.find(json.dumps([*messages, *tools], ensure_ascii=False))
            raise ValueError(
                f"the chat template rewrites contents that hold {found!r}, wanted them kept whole"
            )
        _check_all_shown(messages, shown)
        return marked, marked_tools, mark

    def show(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        opens_answer: bool,
    ) -> str:
        """The template's text. Raises ValueError for messages that it refuses."""
        try:
            return self._render(messages, opens_answer=opens_answer, tools=tools)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode_shown(self, text: str, mark: str | None, *, is_first: bool) -> list[int]:
        """Tokens of a part of the template's text, with `mark` before control texts of contents."""
        encode = self._texts.encode_form if is_first else self._texts.encode_later
        return encode(text, mark)

    @cached_property
    def states_tools(self) -> bool:
        """Whether the template states tools, with calls as JSON between `<tool_call>` tags."""
        return self.shows_functions and f'<tool_call>\n{{"name": "{TOOL_NAME}"' in self._show_call()

    @cached_property
    def states_functions(self) -> bool:
        """Whether the template states tools."""
        return TOOL_NAME in self._try(_opening()[:1], opens_answer=True, tools=[EXAMPLE_TOOL])

    @cached_property
    def shows_functions(self) -> bool:
        """Whether the template states tools and writes calls, in any form."""
        return self.states_functions and TOOL_NAME in self._show_call()

    @property
    def shows_results(self) -> bool:
        """Whether the template accepts messages with the role `tool`."""
        return self._result_role == "tool"

    @cached_property
    def _call_results(self) -> CallResults | None:
        ends = [self.decode([token_id]) for token_id in self.stop_token_ids]
        return find_call_results(partial(self._render, opens_answer=True), ends)

    def _show_call(self) -> str:
        answer = {"role": "assistant", "content": "", "tool_calls": [example_call({})]}
        return self._try([_opening()[0], answer], opens_answer=False)

    def _try(self, messages: Sequence[Message], **options: Any) -> str:
        """The template's text. Empty for messages that it refuses."""
        try:
            return self._render(messages, **options)
        except TemplateError:
            return ""

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        opens_answer: bool,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        values = {"messages": list(messages), "tools": list(tools) or None, "documents": None}
        opens = {"add_generation_prompt": opens_answer}
        return render_template(self.template, self._names, values | opens)

    def _check_form(self) -> int:
        """The token that ends an answer. Raises ValueError if the template rewrites history. Text
        that it writes only around the very last answer, as Qwen3's does, is allowed: here a message
        follows each answer.
        """
        try:
            opened = self._render(_opening()[:1], opens_answer=True)
            closed = self._render(_opening(), opens_answer=False)
            further = self._render([*_opening(), _opening()[0]], opens_answer=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses a plain conversation: {error}") from None
        _check_answer(opened, closed)
        end_text = closed.partition(ANSWER)[2]
        ending = self._texts.encode_form(end_text)
        is_kept = further.startswith(opened + ANSWER)
        behind = self._texts.encode_form(further[len(opened) + len(ANSWER) :])
        if not is_kept or not ending or ending[0] != behind[0]:
            raise ValueError(
                "the chat template rewrites history: after a further message the conversation no "
                f"longer begins with {opened + ANSWER!r} and its end, but is {further!r}"
            )
        _check_questions(opened, further)
        if not self._texts.is_control(ending[0]):
            raise ValueError(
                f"the chat template ends an answer with {end_text!r}, wanted a special token, such as "
                "eos_token, that a model can stop at"
            )
        return ending[0]

    @cached_property
    def drops_thoughts(self) -> bool:
        """Whether the template removes `<think>` blocks from answers before the last question."""
        question, answer = _opening()
        thought = answer | {"content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}
        is_in_last = THOUGHT in self.show([question, thought], opens_answer=False)
        return is_in_last and THOUGHT not in self.show(
            [question, thought, question], opens_answer=True
        )

    @cached_property
    def _header_ids(self) -> list[int]:
        """The template's text after a message's end token, and the answer's header."""
        asked = self._render(_opening()[:1], opens_answer=False)
        opened = self._render(_opening()[:1], opens_answer=True)
        ending = self._render(_opening(), opens_answer=False).partition(ANSWER)[2]
        header = opened[len(asked) :] if opened.startswith(asked) else ""
        return self._texts.encode_form(ending + header)[1:]

    def _find_result_role(self) -> str:
        """`tool` if the template renders messages with this role, else `user`."""
        opened = self._try(_opening()[:1], opens_answer=True)
        shown = self._try([*_opening(), {"role": "tool", "content": RESULT}], opens_answer=True)
        return "tool" if shown.startswith(opened + ANSWER) and RESULT in shown else "user"

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return _bytes_of_tokens(self.tokenizer, is_byte_level=self._is_byte_level)


def load_renderer(path: Path) -> Renderer:
    """The renderer of a checkpoint: by its published template if it has one, else with our tokens."""
    if path.is_dir() and (path / PUBLISHED).is_dir():
        return TemplateRenderer.load(path)
    return Renderer.load(path)


def find_template(files: dict[str, bytes]) -> str | None:
    """The template, from its own file or else the tokenizer's configuration. Raises ValueError unless
    it is a text, or a list of names and templates.
    """
    if TEMPLATE_FILE in files:
        return files[TEMPLATE_FILE].decode()
    for name in ("chat_template.json", TOKENIZER_SETTINGS):
        found = template = json.loads(files.get(name, b"{}")).get("chat_template")
        if found is None:
            continue
        if isinstance(found, list):
            try:
                template = {item["name"]: item["template"] for item in found}.get("default")
            except (TypeError, KeyError):
                template = found
        if template is None or isinstance(template, str):
            return template
        raise ValueError(
            f"{name} has chat_template = {json.dumps(found)[:80]}, wanted a text, or a list of names "
            "and templates"
        )
    return None


def _without_batch_settings(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer without truncation and padding, which files keep from earlier batches."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_answer(opened: str, closed: str) -> None:
    if not closed.startswith(opened) or ANSWER not in closed:
        raise ValueError(
            "the chat template does not write an answer directly after its header: "
            f"{closed!r} does not begin with {opened!r} and hold the answer"
        )


def _check_questions(opened: str, further: str) -> None:
    if opened.count(QUESTION) != 1 or further.count(QUESTION) != 2:
        raise ValueError(
            f"the chat template writes two messages of the user as {further!r}, wanted each once"
        )


def _check_all_shown(messages: Sequence[Mapping[str, Any]], shown: str) -> None:
    """Raises ValueError if the text lacks a message of system, user or tools, apart from white space.
    A template may write it as JSON or as Python does.
    """
    words = "".join(shown.split())
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant" or "".join(content.split()) in words:
            continue
        written = (json.dumps(content), json.dumps(content, ensure_ascii=False), repr(content))
        if not any("".join(text[1:-1].split()) in words for text in written):
            raise ValueError(
                f"the chat template leaves out or rewrites the {message['role']} message {content[:80]!r}, "
                "wanted all of it; import the model with --chat-template chatml or a file"
            )


def _has_byte_fallback(tokenizer: Tokenizer) -> bool:
    """Whether tokens are of SentencePiece's kind: pieces with a mark for spaces, and single bytes."""
    described = json.loads(tokenizer.to_str())
    steps = (described["decoder"] or {}).get("decoders", [])
    spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return (
        described["model"]["type"] == "BPE"
        and spaces in steps
        and {"type": "ByteFallback"} in steps
    )


def _bytes_of_tokens(tokenizer: Tokenizer, *, is_byte_level: bool) -> list[bytes]:
    byte_of = {character: value for value, character in byte_characters().items()}
    added = tokenizer.get_added_tokens_decoder()
    ids = tokenizer.get_vocab()
    table = [b""] * (max(ids.values()) + 1)  # some tokenizers skip ids
    for token, token_id in ids.items():
        if token_id in added:
            table[token_id] = added[token_id].content.encode()
        elif not is_byte_level:
            table[token_id] = _piece_bytes(token)
        else:
            table[token_id] = bytes(byte_of[character] for character in token)
    return table


def _piece_bytes(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return piece.replace(_SPACE, " ").encode() if byte is None else bytes.fromhex(byte[1])


def _opening() -> list[Message]:
    return [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
