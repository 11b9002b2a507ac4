"""Import of a published model as a checkpoint: shape, weights, tokenizer, template."""

import json
import re
from collections.abc import Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from tokenizers import Tokenizer

from ostinato.infra.agent.dialects.published.choice import DIALECT_FILE, find_dialect, write_choice
from ostinato.infra.agent.extensions import COMPACT, DIALECTS, FULL
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.published_models import CONFIG, FAMILIES
from ostinato.models.checkpoint import stream_checkpoint
from ostinato.models.checkpoint.store import PUBLISHED
from ostinato.models.families.family import EMBEDDING, HEAD, Family
from ostinato.models.rendering.chat_template import find_template
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import num_parameters, weight_shapes
from ostinato.tasks.conversion.sources import (
    TOKENIZER,
    PublishedModel,
    check_side_file,
    open_source,
)
from ostinato.tasks.conversion.templates import MAX_TEMPLATE_BYTES, check_syntax, choose_template

_MAX_PARTS = 1024  # layers times experts in one tensor


def import_model(
    place: str,
    directory: Path,
    cache: Path,
    chat_template: str | None = None,
    dialect: str | None = None,
) -> dict[str, str | int]:
    """Writes the checkpoint `directory` and returns facts about it. ConfigError names file, tensor
    or field, value seen and value wanted, and leaves nothing behind. `chat_template`: a file or one
    of our names, instead of the model's own. `dialect`: instead of the one found from the template.
    """
    if dialect is not None:
        _check_dialect(dialect)
    with open_source(place, cache, directory.parent, _read_shape) as source:
        family, spec = _read_shape(source.place, source.config)
        _check_tensors(source, family, spec)
        tokenizer = _read_tokenizer(source, spec)
        _check_template(source)
        side_files, template = choose_template(
            source.files, source.config, tokenizer, chat_template
        )
        dialect = dialect or find_dialect(find_template(side_files) or "") or FULL
        dtypes = {name: _stored_dtype(source, family, spec, name) for name in weight_shapes(spec)}
        dtype = str(dtypes[EMBEDDING]).removeprefix("torch.")
        facts: dict[str, str | int] = {
            "stage": "import",
            "source": source.place,
            "family": family.model_type,
            "dtype": dtype,
            "parameters": num_parameters(spec),
            "vocabulary": tokenizer.get_vocab_size(),
            "chat_template": template,
            "dialect": dialect,
            "note": "\n".join(filter(None, (source.note, _window_note(source.config, spec)))),
        }
        files = {
            f"{PUBLISHED}/{name}": content
            for name, content in side_files.items()
            if name != TOKENIZER
        }
        files[TOKENIZER] = _clean_tokenizer(source.files[TOKENIZER], tokenizer)
        files[f"{PUBLISHED}/{DIALECT_FILE}"] = write_choice(dialect)
        files[f"{PUBLISHED}/{CONFIG}"] = json.dumps(source.config, indent=1).encode()
        weights = family.read_weights(spec, partial(_fetch_finite, source))
        stream_checkpoint(directory, spec, dtypes, weights, files=files, metadata=facts)
    return facts


def _window_note(config: Mapping[str, Any], spec: ModelSpec) -> str:
    """A note if the model's sequences are limited to its sliding window, else empty."""
    longest = config.get("max_position_embeddings", 0)
    if spec.max_sequence_tokens >= longest:
        return ""
    return f"at most {spec.max_sequence_tokens} tokens, its sliding window, of {longest} positions"


def _check_dialect(dialect: str) -> None:
    if dialect == COMPACT:
        raise ConfigError(
            f"--dialect is {COMPACT!r}, wanted another dialect: its calls are tokens of our own models"
        )
    DIALECTS.load(dialect)


def _read_shape(place: str, config: dict[str, Any]) -> tuple[Family, ModelSpec]:
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ConfigError(f"{place}: config.json has model_type {name!r}, wanted a name")
    family: Family = FAMILIES.load(name)
    try:
        return family, family.spec_of(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        text = f"{field} = {first['input']!r}: {first['msg']}" if field else first["msg"]
        raise ConfigError(f"{place}: config.json describes no valid shape: {text}") from None
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _stored_dtype(
    source: PublishedModel, family: Family, spec: ModelSpec, name: str
) -> torch.dtype:
    """The dtype that holds every published part of a canonical tensor exactly."""
    parts = (source.headers[published].dtype for published in family.sources_of(spec, name))
    return reduce(torch.promote_types, parts)


def _fetch_finite(source: PublishedModel, name: str) -> torch.Tensor:
    """A published tensor. Raises ConfigError if it holds NaN or infinity, which break every answer."""
    tensor = source.fetch(name)
    bad = tensor.numel() - int(tensor.isfinite().sum())
    if bad:
        raise ConfigError(
            f"{source.headers[name].path}: tensor {name} holds {bad} values that are NaN or infinite, "
            "wanted none; download the model again"
        )
    return tensor


def _check_tensors(source: PublishedModel, family: Family, spec: ModelSpec) -> None:
    """Checks all names and shapes before anything is copied."""
    num_parts = spec.num_layers * max(spec.num_experts, 1)
    if num_parts > _MAX_PARTS * len(source.headers):
        raise ConfigError(
            f"{source.place}: config.json has {spec.num_layers} layers of {max(spec.num_experts, 1)} "
            f"experts, wanted the shape of these weights: they are {len(source.headers)} tensors"
        )
    wanted = family.source_shapes(spec)
    for name, shape in wanted.items():
        header = source.headers.get(name)
        if header is None:
            raise ConfigError(
                f"{source.place} has no tensor {name}, wanted one of shape {shape}; "
                f"it has {len(source.headers)} of {len(wanted)} tensors"
            )
        if header.shape != shape:
            raise ConfigError(
                f"{header.path}: tensor {name} has shape {header.shape}, wanted {shape} by config.json"
            )
    for name in source.headers.keys() - wanted.keys():
        if not _is_redundant(source, spec, name):
            raise ConfigError(
                f"{source.headers[name].path}: tensor {name} {source.headers[name].shape} is not part "
                f"of a {family.model_type} of this config.json"
            )


def _is_redundant(source: PublishedModel, spec: ModelSpec, name: str) -> bool:
    """Whether a tensor adds nothing to the trunk: a tied copy, a table, a draft layer after the last."""
    if name == HEAD:
        is_alike = source.headers[HEAD].shape == source.headers[EMBEDDING].shape
        return is_alike and bool((source.fetch(HEAD) == source.fetch(EMBEDDING)).all())
    drafts = source.config.get("num_nextn_predict_layers") or 0
    layer = name.removeprefix("model.layers.").partition(".")[0]
    is_draft = (
        re.fullmatch("[0-9]{1,9}", layer) is not None and 0 <= int(layer) - spec.num_layers < drafts
    )
    return is_draft or name.endswith("rotary_emb.inv_freq")


def _read_tokenizer(source: PublishedModel, spec: ModelSpec) -> Tokenizer:
    """The model's tokenizer. Its ids must have no holes, and the model must have a row for each."""
    content = source.files.get(TOKENIZER)
    if content is None:
        raise ConfigError(f"{source.place} holds no {TOKENIZER}, wanted one (a fast tokenizer)")
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # noqa: BLE001  (the library raises nothing narrower)
        raise ConfigError(f"{source.place}: {TOKENIZER} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
    holes = sorted(set(range(len(ids))) - ids)
    if holes:
        raise ConfigError(
            f"{source.place}: {TOKENIZER} has no token of id {holes[0]} ({len(holes)} holes below "
            f"{max(ids)}), wanted ids without holes"
        )
    if len(ids) > spec.vocab_size:
        raise ConfigError(
            f"{source.place}: {TOKENIZER} has {len(ids)} tokens, wanted at most vocab_size = "
            f"{spec.vocab_size} of config.json"
        )
    return tokenizer


def _clean_tokenizer(content: bytes, tokenizer: Tokenizer) -> bytes:
    """The tokenizer's file without the truncation and padding that a training run may have saved in it. They would
    cut prompts, or fill them up.
    """
    described = json.loads(content)
    if described.get("truncation") is None and described.get("padding") is None:
        return content
    return tokenizer.to_str().encode()


def _check_template(source: PublishedModel) -> None:
    """Checks the small files, and that the chat template, if there is one, parses."""
    for name, content in source.files.items():
        check_side_file(source.place, name, content)
    try:
        template = find_template(source.files)
    except ValueError as error:
        raise ConfigError(f"{source.place}: {error}") from None
    if template is None:
        return
    if len(template) > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"{source.place}: the chat template has {len(template)} characters, wanted at most "
            f"{MAX_TEMPLATE_BYTES}"
        )
    check_syntax(f"{source.place}: the chat template", template)
