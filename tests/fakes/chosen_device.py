"""A device that this machine has not: tensors say that they are on it, and their values are in memory.

torch's "meta" device lends its name, so that neither the CPU nor CUDA is the chosen one. While
`ChosenDevice(strict=True)` is on, a tensor that is made anywhere else fails the test, and so does an
operation that mixes devices, except in the functions of `ON_THE_CPU`. Copies to and from the device
are what they are on a GPU: explicit, and allowed.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")
# lift_fresh and detach: an array of NumPy seen as a tensor, and back
TRANSFERS = (
    "aten::_to_copy",
    "aten::copy_",
    "aten::_local_scalar_dense",
    "aten::lift_fresh",
    "aten::detach",
)
# Where the CPU is meant: its own products, weights on their way to and from files, frequencies of RoPE when a
# model is built, and the step counter of an AdamW that is not fused.
ON_THE_CPU = (
    ("models/checkpoint/store.py", ("load_checkpoint", "save_checkpoint", "open_checkpoint")),
    ("models/checkpoint/resume.py", ("save", "load_parts")),
    ("models/network/build.py", ("export_weights", "read_weights", "set_rope_scaling")),
    ("models/network/attention/latent.py", ("_frequencies",)),
    ("models/network/parallel/shards.py", ("sharded_parts",)),
    ("kernels/fp32_products.py", ("choose_fp32_products",)),
    ("rotary_pos_embedding.py", ("__init__",)),
    ("torch/optim/adam.py", ("_init_group", "_single_tensor_adam")),
)


class WrongDevice(AssertionError):
    """A tensor that was made on a device that nobody chose."""


class DeviceTensor(torch.Tensor):
    """A tensor of the chosen device. `values` are what a GPU would hold."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.values = values
        return made

    @property
    def data(self) -> Tensor:
        """Megatron sets it, which torch tells no subclass."""
        return self.detach()

    @data.setter
    def data(self, other: "DeviceTensor") -> None:
        torch.Tensor.data.__set__(self, other)
        self.values = other.values

    def tolist(self) -> Any:
        """As of any device; torch has none for subclasses."""
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {}, strict=False)


class _KeepValues(TorchFunctionMode):
    """`torch.tensor` onto the device as on a GPU: torch makes nothing but shapes on "meta"."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


class ChosenDevice(TorchDispatchMode):
    """The device is there. `strict`: and nothing else may be used."""

    def __init__(self, *, strict: bool) -> None:
        super().__init__()
        self.strict = strict
        self.num_operations = 0
        self._keep_values = _KeepValues()

    def __enter__(self):
        self._keep_values.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._keep_values.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        return run(func, args, kwargs or {}, strict=self.strict)


def run(func: Any, args: Any, kwargs: dict[str, Any], *, strict: bool) -> Any:
    """Result of an operation on the values, on the device that it would be on."""
    name = func.name().split(".")[0]
    outer_of: dict[int, Tensor] = {}
    plain: list[Tensor] = []

    def unwrap(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            outer_of[id(value.values)] = value
            return value.values
        if isinstance(value, Tensor):
            plain.append(value)
        return value

    inner_args, inner_kwargs = tree_map(unwrap, (args, kwargs))
    named = inner_kwargs.get("device")
    if named is not None:
        inner_kwargs["device"] = torch.device("cpu")
    is_ours = bool(outer_of) if named is None else torch.device(named) == DEVICE
    is_checked = strict and name not in TRANSFERS
    if is_checked and outer_of and plain and not _is_on_the_cpu():
        shapes = [tuple(one.shape) for one in plain]
        raise WrongDevice(f"{name} meets tensors {shapes} of the CPU, wanted all on {DEVICE}")
    result = func(*inner_args, **inner_kwargs)
    if torch.Tag.inplace_view in func.tags:  # another shape of the same tensor
        with no_dispatch():
            func(*args, **kwargs)

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or any(value is one for one in plain):
            return value
        if id(value) in outer_of:
            return outer_of[id(value)]
        if is_ours:
            return DeviceTensor(value)
        if is_checked and not _is_on_the_cpu():
            raise WrongDevice(f"{name} makes a tensor on the CPU, wanted {DEVICE}")
        return value

    return tree_map(wrap, result)


def _is_on_the_cpu() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        for file, functions in ON_THE_CPU:
            if code.co_filename.endswith(file) and code.co_name in functions:
                return True
        frame = frame.f_back
    return False
