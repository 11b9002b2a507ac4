"""Shapes that our engine decodes. Imports without torch, so that a recipe is refused before a run
starts.
"""

from typing import Any

from ostinato.models.spec import ModelSpec

LANES = 16  # float32 in a 512-bit vector register; LLVM splits vectors for shorter registers


def check_vectors(spec: ModelSpec) -> None:
    """Refuses a shape that the compiled trunk does not support, or rows that do not fill vectors."""
    only: dict[str, tuple[Any, ...]] = {
        "latent": (None,),
        "num_dense_layers": (0, spec.num_layers),
        "router_groups_per_token": (spec.router_groups,),
        "shared_expert_hidden_size": (0,),
        "rotary_fraction": (1.0,),
    }
    for name, values in only.items():
        if getattr(spec, name) not in values:
            raise ValueError(
                f"{name}={getattr(spec, name)}, wanted {values[-1]} for compiled decoding; "
                'vLLM decodes this shape: [decoding] engine = "vllm"'
            )
    multiples = {"hidden_size": LANES, "head_dim": LANES, "mtp_hidden_size": LANES // 2}
    # rows of mtp_hidden_size hold gate and up, so each may fill half a vector
    multiples |= {"expert_hidden_size": LANES, "dense_hidden_size": LANES}
    for name, multiple in multiples.items():
        if getattr(spec, name) % multiple:
            raise ValueError(
                f"{name}={getattr(spec, name)}, wanted a multiple of {multiple} for compiled decoding"
            )
