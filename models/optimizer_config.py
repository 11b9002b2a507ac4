"""Settings of the optimiser, free of tensors so that recipes can hold them."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OptimizerConfig(BaseModel):
    """Rates and decays. Rates here are the peak; schedules scale them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["muon", "adamw"] = Field(
        default="muon", description="adamw: everything by AdamW, no Muon."
    )
    muon_learning_rate: float = Field(default=0.02, gt=0, description="Of Muon; unused with adamw.")
    adam_learning_rate: float = Field(default=4e-3, gt=0, description="Of AdamW.")
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Decay of Muon's momentum.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of AdamW's second moment.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled, times the rate.")
