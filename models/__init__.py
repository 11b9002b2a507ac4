"""Network, checkpoints, training and decoding of models."""

from ostinato.models.late_compilation import compile_late_in_megatron

compile_late_in_megatron()
