"""Pre-tokenizers of byte-level BPE, by llama.cpp's names.

A GGUF file holds only the name (`tokenizer.ggml.pre`), which also determines `ignore_merges`:
whether a piece that is in the vocabulary needs no merges.
"""

from typing import Any

from ostinato.infra.platform.errors import ConfigError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGIT, _DIGITS = (_WORDS + number + _REST for number in (r"\p{N}", r"\p{N}{1,3}"))
_NAMES = {(_DIGIT, False): "qwen2", (_DIGITS, False): "glm4", (_DIGITS, True): "llama-bpe"}
_PATTERNS = {name: split for split, name in _NAMES.items()}
SPLITS = ("gpt-2", "smollm", *_PATTERNS)


def split_name(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name of a `tokenizer.json`'s pre-tokenizer. Raises ConfigError if it has none."""
    described, is_whole = tokenizer["pre_tokenizer"], bool(tokenizer["model"].get("ignore_merges"))
    parts = described.get("pretokenizers", [described])
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and not is_whole:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and not is_whole:
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        name = _NAMES.get((parts[0]["pattern"].get("Regex", ""), is_whole))
        if name is not None:
            return name
    raise ConfigError(
        f"the tokenizer splits texts by {' and '.join(kinds)} (ignore_merges {is_whole}) in a way that "
        f"llama.cpp may not know, wanted that of {', '.join(SPLITS)}"
    )


def with_split(tokenizer: dict[str, Any], name: str) -> dict[str, Any]:
    """The `tokenizer.json` with the pre-tokenizer of a name in `SPLITS`."""
    parts: list[dict[str, Any]] = [_BYTES]
    is_whole = False
    if name == "smollm":
        parts = [{"type": "Digits", "individual_digits": True}, _BYTES]
    elif name in _PATTERNS:
        pattern, is_whole = _PATTERNS[name]
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        parts = [{**split, "invert": False}, {**_BYTES, "use_regex": False}]
    model = {**tokenizer["model"], "ignore_merges": is_whole}
    splitting = {"type": "Sequence", "pretokenizers": parts}
    return {**tokenizer, "model": model, "pre_tokenizer": splitting}
