"""Stage: rounds weights to bf16, so that evaluations measure exactly the model that an export in bf16 contains."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ostinato.tasks.conversion.own_stage import StageWork


def rounded(work: StageWork) -> Iterator[tuple[str, Tensor]]:
    """Each weight, rounded to bf16 and stored in fp32 as before."""
    for name, weight in work.checkpoint.weights.items():
        kept_exact = name in work.settings.get("except", ())
        yield name, weight if kept_exact else weight.to(torch.bfloat16).float()
