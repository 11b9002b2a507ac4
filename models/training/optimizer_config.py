"""Settings of the optimiser in pretraining, MTP and RL, free of tensors so that recipes can hold them."""

from typing import Literal

from pydantic import Field

from ostinato.models.record import Record


class OptimizerConfig(Record):
    """Optimiser of a training stage, without the learning rates, which the stage schedules."""

    kind: Literal["muon", "adamw"] = "muon"
    """muon: matrices by Muon, the rest by AdamW; adamw: all by AdamW"""
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled, times the rate")
    gradient_clip_norm: float | None = Field(default=None, gt=0)
    """largest gradient norm, separately for trunk and draft layers; None: not clipped"""
