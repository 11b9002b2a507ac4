"""Megatron-core without PyTorch's compiler, in processes that have no GPU.

Megatron decorates functions with `torch.compile` while it is imported, and the first decoration
loads the compiler with its backend: 840 modules, 3 of the 9 s of processor time of a trainer's
imports (docs/lab-log.md). On a CPU none of the functions is called, so compilation is deferred to
the first call. PyTorch's optimizers still load part of the compiler, `torch._dynamo`.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import FunctionType
from typing import Any


class _MegatronWatcher(MetaPathFinder):
    """Finds nothing; changes `torch.compile` when Megatron-core is about to be imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        """None, for any module."""
        if fullname == "megatron.core":
            torch: Any = importlib.import_module("torch")
            if not torch.cuda.is_available():
                torch.compile = _compile_at_first_call(torch.compile)


def _compile_at_first_call(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` that waits, for plain functions, until the compiled one is called."""

    @functools.wraps(compile_now)
    def compile_late(model: Any = None, **options: Any) -> Any:
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))
        return functools.wraps(model)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    return compile_late


def compile_late_in_megatron() -> None:
    """Installs the watcher. To be called once per process, before it first imports Megatron-core."""
    sys.meta_path.insert(0, _MegatronWatcher())
