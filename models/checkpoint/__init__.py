"""Checkpoints on disk: weights, shape, tokenizer."""

from ostinato.models.checkpoint.store import (
    Checkpoint,
    OpenCheckpoint,
    load_checkpoint,
    load_spec,
    open_checkpoint,
    save_checkpoint,
    stream_checkpoint,
)

__all__ = [
    "Checkpoint",
    "OpenCheckpoint",
    "load_checkpoint",
    "load_spec",
    "open_checkpoint",
    "save_checkpoint",
    "stream_checkpoint",
]
