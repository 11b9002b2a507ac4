"""Settings of the search encoder's tower, free of tensors so that recipes can hold them."""

from pydantic import Field

from ostinato.models.record import Record


class TowerConfig(Record):
    """Size of the encoder, and its regularisation."""

    width: int = Field(default=128, ge=8, description="length of a vector")
    num_words: int = Field(default=12_000, ge=1, description="words with their own vector")
    num_buckets: int = Field(default=4_096, ge=1, description="fixed vectors for all other words")
    query_dropout: float = Field(default=0.2, ge=0, lt=1)
    """share of a question's words dropped in training"""
    code_dropout: float = Field(default=0.4, ge=0, lt=1)
    """share of a function's words dropped in training"""
    forget_ratio: float = Field(default=0.1, ge=0, lt=1)
    """share of the known words that a training batch treats as unknown, so that the weight of
    unknown words is learned"""
