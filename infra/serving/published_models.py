"""Model families by name, and a model as the directory that transformers, vLLM and SGLang load.

A package adds a family through the entry point group `ostinato.families`, which names a `Family`
(models/families/family.py). Draft layers are not written, since only our own code knows their form.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.plugins import PluginGroup
from ostinato.models.checkpoint.streaming import write_tensors
from ostinato.models.families.family import Family, Fetch
from ostinato.models.spec import ModelSpec

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FAMILIES = PluginGroup(
    "ostinato.families",
    "model family",
    {
        "llama": "ostinato.models.families.dense:LLAMA",
        "mistral": "ostinato.models.families.dense:MISTRAL",
        "phi3": "ostinato.models.families.dense:PHI3",
        "qwen2": "ostinato.models.families.dense:QWEN2",
        "qwen3": "ostinato.models.families.dense:QWEN3",
        "qwen3_moe": "ostinato.models.families.experts:QWEN3_MOE",
        "glm4_moe": "ostinato.models.families.experts:GLM4_MOE",
        "deepseek_v3": "ostinato.models.families.latent:DEEPSEEK_V3",
        "kimi_k2": "ostinato.models.families.latent:KIMI_K2",
    },
)


def family_of_spec(spec: ModelSpec) -> Family:
    """The first family that can describe a shape. ConfigError when none can."""
    for name in FAMILIES.names:
        family: Family = FAMILIES.load(name)
        if family.config_of(spec) is not None:
            return family
    raise ConfigError(
        f"no model family of {', '.join(FAMILIES.names)} has this shape: "
        f"{spec.model_dump(exclude_defaults=True)}; a package adds one in group {FAMILIES.group!r}"
    )


def write_model_directory(
    directory: Path,
    spec: ModelSpec,
    fetch: Fetch,
    dtype: torch.dtype,
    extra_fields: Mapping[str, Any] | None = None,
    stored_dtypes: Mapping[str, torch.dtype] | None = None,
) -> Family:
    """Writes weights and `config.json`, one tensor in memory at a time, and returns the family.

    `fetch` reads a canonical tensor, as `__getitem__` of tensors in memory does. `extra_fields`: further fields
    of `config.json`; the family's own win. `stored_dtypes`: dtypes by canonical name that tensors keep; `dtype`
    is then only declared.
    """
    family = family_of_spec(spec)
    directory.mkdir(parents=True, exist_ok=True)
    stored, origins = stored_dtypes or {}, family.origins(spec)
    layout = {
        name: (shape, _dtype_of(name, stored.get(origins[name], dtype)))
        for name, shape in family.published_shapes(spec).items()
    }
    write_tensors(directory / WEIGHTS, layout, family.write_weights(spec, fetch))
    settings = {**(extra_fields or {}), **(family.config_of(spec) or {})}
    settings["torch_dtype"] = settings["dtype"] = str(dtype).removeprefix("torch.")
    (directory / CONFIG).write_text(json.dumps(settings, indent=1))
    return family


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Balancing biases are single precision in every published checkpoint."""
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype
