"""Checkpoints on disk: weights, shape, tokenizer, optimiser state."""

from ostinato.models.checkpoint.store import (
    Checkpoint,
    load_checkpoint,
    load_optimizer_state,
    load_spec,
    save_checkpoint,
    stream_checkpoint,
)

__all__ = [
    "Checkpoint",
    "load_checkpoint",
    "load_optimizer_state",
    "load_spec",
    "save_checkpoint",
    "stream_checkpoint",
]
