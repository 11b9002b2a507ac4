"""Low-rank adapters in the files of the PEFT library: `adapter_model.safetensors`,
`adapter_config.json`.

Shapes: R rank, I inputs, O outputs of a layer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ostinato.models.families.family import parts_of
from ostinato.models.spec import ModelSpec

ADAPTER = "adapter"  # folder beside the merged weights of a checkpoint
ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """Low-rank update that was trained, then merged into a checkpoint's weights."""

    halves: Mapping[str, tuple[Tensor, Tensor]]  # (down_RI, up_OR) by canonical name
    rank: int
    alpha: float


def write_adapter(directory: Path, spec: ModelSpec, adapter: TrainedAdapter) -> None:
    """Writes the adapter under the names that the family publishes."""
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    for name, (down_RI, up_OR) in adapter.halves.items():
        for published, place in parts_of(spec, name):
            module = published.removesuffix(".weight")
            modules.append(module)
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = down_RI.clone()
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = up_OR[place].contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / _WEIGHTS)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=1))
