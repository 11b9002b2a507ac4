"""Ostinato trains a coding agent. The root of the repository is this package: `ostinato.flows` is `flows/`.

`ostinato.open(home)` gives runs, attempts and checkpoints to Python programs. Types: `__init__.pyi`.
"""

from importlib import import_module
from typing import Any

# Relative names: all stages import this module, and an absolute name would make these a part of every stage's code.
_DOORS = {
    "CheckpointArtifact": (".flows.python_api", "CheckpointArtifact"),
    "Home": (".flows.python_api", "Home"),
    "ReinforcementRun": (".flows.python_api", "ReinforcementRun"),
    "Recipe": (".flows.recipe", "Recipe"),
    "evaluate": (".flows.python_api", "evaluate"),
    "open": (".flows.python_api", "open_home"),
}
__all__ = tuple(_DOORS)


def __getattr__(name: str) -> Any:
    """Imports what a program asks for. Until then `import ostinato` imports nothing else."""
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _DOORS[name]
    return getattr(import_module(module, __name__), attribute)
