"""Special tokens in the small files of a published model: their texts, and which end an answer."""

import json
from collections.abc import Mapping
from typing import Any

TOKENIZER_SETTINGS = "tokenizer_config.json"
GENERATION, SPECIAL_MAP, CONFIG = (
    "generation_config.json",
    "special_tokens_map.json",
    "config.json",
)
_ENDS = "eos_token_id"


def token_text(token: Any) -> str:
    """Text of a special token, which tokenizer settings hold as a string or a record. Raises
    ValueError for any other form.
    """
    text = token.get("content") if isinstance(token, dict) else token or ""
    if not isinstance(text, str):
        raise ValueError(
            f"a special token is {json.dumps(token)[:80]}, wanted a text or a record with its content"
        )
    return text


def tokenizer_settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The tokenizer's settings. As in transformers, special_tokens_map.json is used if they do not
    list added tokens.
    """
    settings = _read(files, TOKENIZER_SETTINGS)
    if "added_tokens_decoder" in settings:
        return settings
    return settings | {name: value for name, value in _read(files, SPECIAL_MAP).items() if value}


def published_ends(files: Mapping[str, bytes], num_tokens: int) -> set[int]:
    """Ids that end an answer according to generation_config.json and config.json. Raises ValueError
    for an id outside the model's vocabulary, which has at least the tokenizer's `num_tokens`.
    """
    size = max(_read(files, CONFIG).get("vocab_size") or 0, num_tokens)
    found: set[int] = set()
    for name in (GENERATION, CONFIG):
        value = _read(files, name).get(_ENDS)
        for token_id in _listed(value):
            if type(token_id) is not int or not 0 <= token_id < size:
                raise ValueError(
                    f"{name} has {_ENDS} = {json.dumps(value)[:80]}, wanted ids of 0 to {size - 1}: "
                    f"{json.dumps(token_id)[:40]} is not in the vocabulary"
                )
            found.add(token_id)
    return found


def with_ends(
    files: Mapping[str, bytes], config: Mapping[str, Any], stop_token_ids: tuple[int, ...]
) -> dict[str, bytes]:
    """The files with generation settings that name all ends, for engines that load an export."""
    settings = _read(files, GENERATION)
    if set(end_ids(files, config)) == set(stop_token_ids):
        return dict(files)
    written = json.dumps(settings | {_ENDS: list(stop_token_ids)}, indent=1)
    return {**files, GENERATION: written.encode()}


def end_ids(files: Mapping[str, bytes], config: Mapping[str, Any]) -> list[int]:
    """End ids as an engine reads them from a model directory: generation settings take precedence."""
    return _listed(_read(files, GENERATION).get(_ENDS, config.get(_ENDS)))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _read(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return json.loads(files.get(name, b"{}"))
