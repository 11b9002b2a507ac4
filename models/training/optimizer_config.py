"""Settings of the optimiser, the same in pretraining, MTP and RL. Free of tensors for recipes."""

from typing import Literal

from pydantic import Field

from ostinato.models.record import Record


class OptimizerConfig(Record):
    """Optimiser of a training stage. Learning rates are the stage's, which schedules them."""

    kind: Literal["muon", "adamw"] = "muon"
    """muon: matrices by Muon, the rest by AdamW; adamw: all by AdamW"""
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled, times the rate")
    gradient_clip_norm: float | None = Field(default=None, gt=0)
    """largest gradient norm, of trunk and draft layers each; None: not clipped"""
