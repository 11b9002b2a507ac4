"""Deferred compilation in Megatron-core, for processes without a GPU.

Importing Megatron decorates functions with `torch.compile`, and the first decoration loads the
compiler with its backend: 840 modules, 3 of the 9 s of processor time of a trainer's imports
(docs/lab-log.md). None of these functions is called on a CPU, so compilation waits for the first
call. PyTorch's optimizers still load part of the compiler, `torch._dynamo`.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import FunctionType
from typing import Any


class _MegatronWatcher(MetaPathFinder):
    """Import hook that changes `torch.compile` just before Megatron-core is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        """Always returns None: it finds no module."""
        if fullname == "megatron.core":
            torch: Any = importlib.import_module("torch")
            if not torch.cuda.is_available():
                torch.compile = _compile_at_first_call(torch.compile)


def _compile_at_first_call(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` that compiles a plain function only when it is first called."""

    @functools.wraps(compile_now)
    def compile_late(model: Any = None, **options: Any) -> Any:
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))
        return functools.wraps(model)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    return compile_late


def compile_late_in_megatron() -> None:
    """Installs the hook. Call it once per process, before the first import of Megatron-core."""
    sys.meta_path.insert(0, _MegatronWatcher())
