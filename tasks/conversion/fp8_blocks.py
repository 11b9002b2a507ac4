"""Matrices published as fp8 in blocks that share a scale (DeepSeek-V3, Qwen3-*-FP8), read as bf16.

A matrix `X.weight` of dtype F8_E4M3 has its scales in `X.weight_scale_inv`, one per block.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.published_models import CONFIG
from ostinato.models.checkpoint.streaming import TensorFiles, TensorHeader

Block = tuple[int, int]
FP8 = {"F8_E4M3": torch.float8_e4m3fn}  # safetensors' name and torch's
FIELD, SIZES, SCALE = "quantization_config", "weight_block_size", "_scale_inv"
# None: the field may be absent
_SUPPORTED: dict[str, tuple[str | None, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("float", "ue8m0", None),  # rounding of scales; they are stored in their own dtype
    "expert_dtype": ("fp8", None),
}
# Quantised matrices are known by their dtypes; `dequantize` is a request to transformers.
_UNUSED = {"modules_to_not_convert", "ignored_layers", "modules_to_convert", "dequantize"}


def take_block(place: str, config: dict[str, Any]) -> Block | None:
    """Removes the quantisation from a configuration and returns (rows, columns) of a block, or None
    if nothing is quantised. Raises ConfigError for another kind of quantisation.
    """
    stated = config.pop(FIELD, None)
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise _refusal(place, FIELD, stated, "an object")
    for name, supported in _SUPPORTED.items():
        if stated.get(name) not in supported:
            wanted = " or ".join(repr(value) for value in supported if value is not None)
            raise _refusal(place, f"{FIELD}.{name}", stated.get(name), wanted)
    for name, value in stated.items():
        if name not in {*_SUPPORTED, *_UNUSED, SIZES}:
            wanted = "no such field: it is not understood"
            raise _refusal(place, f"{FIELD}.{name}", value, wanted)
    match stated.get(SIZES):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case block:
            wanted = "two positive whole numbers such as [128, 128]"
            raise _refusal(place, f"{FIELD}.{SIZES}", block, wanted)


def _refusal(place: str, field: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(
        f"{place}: {CONFIG}: {field} = {value!r}, wanted {wanted}. Quantised directories are read "
        f'only for "fp8" in "e4m3" with {SIZES}; otherwise take a bf16 copy'
    )


def read_as_bf16(
    tensors: TensorFiles, block: Block | None
) -> tuple[dict[str, TensorHeader], Callable[[str], Tensor]]:
    """Headers without scales, and a function that fetches a tensor and dequantises it. Raises
    ConfigError if a matrix and its scales do not match.
    """
    headers = tensors.headers
    stored = set(FP8.values())
    quantized = {
        name
        for name, header in headers.items()
        if header.dtype in stored and not name.endswith(SCALE)
    }
    if block is None:
        for name, header in headers.items():
            if header.dtype in stored:
                raise ConfigError(
                    f"{header.path}: tensor {name} has dtype F8_E4M3, but {CONFIG} has no {FIELD}, "
                    f"wanted one that states {SIZES}, or a tensor of F32, BF16 or F16"
                )
        return headers, tensors.fetch
    for name in quantized:
        _check_scales(headers, name, block)
    for name, header in headers.items():
        weight = name.removesuffix(SCALE)
        if weight != name and weight not in quantized:
            seen = f"of dtype {headers[weight].dtype}" if weight in headers else "missing"
            raise ConfigError(
                f"{header.path}: tensor {name} holds scales, but {weight} is {seen}, wanted it as "
                "F8_E4M3"
            )

    def fetch(name: str) -> Tensor:
        tensor = tensors.fetch(name)
        if name not in quantized:
            return tensor
        return dequantize_blocks(tensor, tensors.fetch(name + SCALE), block)

    dense = {
        name: header._replace(dtype=torch.bfloat16) if name in quantized else header
        for name, header in headers.items()
        if not name.endswith(SCALE)
    }
    return dense, fetch


def dequantize_blocks(weight: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Each block times its scale in fp32, rounded once to bf16. The last blocks may be cut."""
    rows, columns = block
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    # by stripes of blocks, since a whole matrix in fp32 takes four times the memory of fp8
    stripes = zip(result.split(rows), weight.split(rows), scales.float(), strict=True)
    for stripe, values, factors in stripes:
        stripe.copy_(values.float() * factors.repeat_interleave(columns)[: weight.shape[1]])
    return result


def _check_scales(headers: dict[str, TensorHeader], name: str, block: Block) -> None:
    shape, _, path = headers[name]
    where = f"{path}: tensor {name} {shape} has dtype F8_E4M3"
    if len(shape) != 2:
        raise ConfigError(f"{where}, wanted a matrix of that dtype; take a bf16 copy")
    wanted = tuple(-(-length // size) for length, size in zip(shape, block, strict=True))
    scales = headers.get(name + SCALE)
    if scales is None:
        raise ConfigError(f"{where}, but there is no {name}{SCALE}, wanted one of shape {wanted}")
    if scales.shape != wanted or scales.dtype in FP8.values():
        raise ConfigError(
            f"{scales.path}: tensor {name}{SCALE} has shape {scales.shape} and dtype {scales.dtype}, wanted "
            f"{wanted} of F32, BF16 or F16: a scale for each block of {block} of {shape}"
        )
