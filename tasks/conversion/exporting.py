"""Export of a checkpoint as a directory that transformers, vLLM and SGLang load: weights,
`config.json`, tokenizer, chat template, and a model card with lineage and scorecards.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ostinato.infra.agent.dialects.compact.tools import COMPACT_TOOLS
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.published_models import CONFIG, family_of_spec, write_model_directory
from ostinato.models.checkpoint import load_spec
from ostinato.models.checkpoint.adapter_files import ADAPTER, ADAPTER_CONFIG
from ostinato.models.checkpoint.store import PUBLISHED, TOKENIZER, WEIGHTS, read_marker
from ostinato.models.checkpoint.streaming import TensorFiles
from ostinato.models.families.family import EMBEDDING, Family
from ostinato.models.rendering.chat_template import TEMPLATE_FILE
from ostinato.models.rendering.special_tokens import TOKENIZER_SETTINGS
from ostinato.models.rendering.vocabulary import (
    CALL_TAGS,
    CONTROL_TOKENS,
    END,
    END_OF_TEXT,
    LINE_TAGS,
    PAD,
    SPECIAL_IDS,
)
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.conversion.sources import load_extra_module

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CARD = "README.md"
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CODE = "auto_map"  # names Python files of a published model, which are not imported


def export_model(
    checkpoint: Path,
    directory: Path,
    *,
    name: str,
    lineage: Sequence[str],
    scores: Sequence[str] = (),
    dtype: str | None,
    with_gguf: bool = False,
) -> dict[str, Any]:
    """Fills `directory`, which must be new or empty, and returns facts. `dtype` None: as stored.

    A model without a published form, or without a GGUF form if `with_gguf`, is refused before
    anything is written.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty, wanted a new or empty directory")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, wanted one of {', '.join(DTYPES)}")
    marker, spec = read_marker(checkpoint), load_spec(checkpoint)
    family = family_of_spec(spec)
    gguf = None
    if with_gguf:
        gguf = load_extra_module("ostinato.tasks.conversion.gguf_writing", "--gguf")
    if gguf is not None:
        gguf.check_gguf(family.config_of(spec), checkpoint / TOKENIZER)
    weights = TensorFiles.of([checkpoint / WEIGHTS])
    chosen = DTYPES[dtype] if dtype is not None else weights.headers[EMBEDDING].dtype
    fields = _published_fields(checkpoint, family)
    kept = {name: header.dtype for name, header in weights.headers.items()} if dtype is None else {}
    write_model_directory(directory, spec, weights.fetch, chosen, fields, kept)
    (directory / TOKENIZER).write_bytes((checkpoint / TOKENIZER).read_bytes())
    for path in sorted((checkpoint / PUBLISHED).glob("*")):
        if path.name != CONFIG:
            (directory / path.name).write_bytes(path.read_bytes())
    if not (checkpoint / PUBLISHED).is_dir():
        (directory / TEMPLATE_FILE).write_text(write_own_template(), encoding="utf-8")
    _write_tokenizer_settings(directory / TOKENIZER_SETTINGS)
    facts = {
        "family": family.model_type,
        "parameters": num_parameters(spec),
        "dtype": str(chosen).removeprefix("torch."),
        "draft_layers_left_out": spec.mtp_depth,
    }
    (directory / CARD).write_text(_card(name, lineage, scores, facts, marker["metadata"]))
    if gguf is not None:
        gguf.write_gguf(directory)
    return facts


def export_adapter(
    checkpoint: Path,
    directory: Path,
    *,
    name: str,
    lineage: Sequence[str],
    scores: Sequence[str] = (),
) -> dict[str, Any]:
    """Fills `directory` with the trained adapter of a checkpoint, for the PEFT library."""
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty, wanted a new or empty directory")
    kept = checkpoint / ADAPTER
    if not kept.is_dir():
        raise ConfigError(
            f"{name} was trained without adapters, wanted a checkpoint of a run with [lora]"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(kept.iterdir()):
        (directory / path.name).write_bytes(path.read_bytes())
    settings = json.loads((directory / ADAPTER_CONFIG).read_text())
    facts = {"rank": settings["r"], "layers": len(settings["target_modules"])}
    card = _card(name, lineage, scores, facts, read_marker(checkpoint)["metadata"])
    (directory / CARD).write_text(card.replace("library_name: transformers", "library_name: peft"))
    return facts


def _published_fields(checkpoint: Path, family: Family) -> dict[str, Any]:
    """Fields of the model's published configuration, or those of our own tokens without one.

    Only the token fields of another family's configuration are kept, since its other fields would
    have other meanings.
    """
    path = checkpoint / PUBLISHED / CONFIG
    if not path.is_file():
        stops = [SPECIAL_IDS[END], SPECIAL_IDS[END_OF_TEXT]]
        return {"bos_token_id": None, "eos_token_id": stops}
    fields = json.loads(path.read_bytes())
    # the family writes these from the current shape
    rope = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    if fields.get("model_type") != family.model_type:
        fields = {key: fields[key] for key in _TOKEN_FIELDS if key in fields}
    return {key: value for key, value in fields.items() if key not in (*rope, CODE)}


def _write_tokenizer_settings(path: Path) -> None:
    """Writes settings for our tokens, or removes references to code from the model's own settings."""
    if not path.is_file():
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
        }
        path.write_text(json.dumps(settings, indent=1))
        return
    settings = json.loads(path.read_bytes())
    if settings.pop(CODE, None) is not None:
        path.write_text(json.dumps(settings, indent=1))


def _card(
    name: str,
    lineage: Sequence[str],
    scores: Sequence[str],
    facts: dict[str, Any],
    metadata: dict[str, Any],
) -> str:
    lines = ["---", "library_name: transformers", "tags: [ostinato]", "---", "", f"# {name}", ""]
    lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in facts.items()]
    lines += ["", "## Lineage", "", "Made by Ostinato from these, nearest first:", ""]
    lines += [f"- `{parent}`" for parent in lineage] or ["- none in the ledger"]
    lines += ["", "## Scorecards", "", "Problems solved, with 90 % intervals:", ""]
    lines += [f"- {score}" for score in scores] or ["- none in the ledger"]
    lines += ["", "## Records of its last stage", ""]
    lines += [f"- {key}: {value}" for key, value in metadata.items()] or ["- none"]
    return "\n".join(lines) + "\n"


BODY = Path(__file__).with_name("own_tokens.jinja")


def write_own_template() -> str:
    """The chat template of our own form, with the current tokens and tools."""
    words = {
        "system": (*CONTROL_TOKENS, *CALL_TAGS, *LINE_TAGS),
        "user": (*CONTROL_TOKENS, *CALL_TAGS, *LINE_TAGS),
        "tool": (*CONTROL_TOKENS, *CALL_TAGS),
        "assistant": CONTROL_TOKENS,
    }
    bare_arguments = {name: tool.primary for name, tool in COMPACT_TOOLS.items()}
    tables = {"words": words, "bare_arguments": bare_arguments}
    heads = [f"{{%- set {name} = {json.dumps(table)} %}}\n" for name, table in tables.items()]
    return "".join(heads) + BODY.read_text(encoding="utf-8")
