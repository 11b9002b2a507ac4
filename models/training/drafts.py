"""Self-distillation: draft layers learn the main head's whole distribution.

Depth d at position t scores token t+2+d from the trunk's state at t and the tokens up to t+1+d. Its
teacher is the main head at position t+1+d, which scores the same token from the same tokens.

Shapes: B rows, T tokens, S positions of a depth (time first), C chosen positions, V vocabulary, D
model width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ostinato.models.network.build import TrainerModel
from ostinato.models.network.head import head_logits
from ostinato.models.network.mixed import mixed_context
from ostinato.models.training.objective import distillation_kl


def compare_drafts(
    model: TrainerModel,
    hidden_TBD: Tensor,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    *,
    reaches_trunk: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, per depth, KL(main head || draft layer) in nats and whether their likeliest tokens
    agree, at the masked-in tokens. With `reaches_trunk` gradients reach states, embedding and head.
    """
    head_VD, embedding_VD = model.head_VD, model.embedding_VD
    if not reaches_trunk:
        hidden_TBD = hidden_TBD.detach()
        head_VD, embedding_VD = head_VD.detach(), embedding_VD.detach()
    states = model.draft_states(hidden_TBD, embedding_VD[tokens_BT.T])
    for depth, state_SBD in enumerate(states):
        chosen_C = mask_BT.T[2 + depth :].reshape(-1).nonzero()[:, 0]
        positions = len(tokens_BT.T) - 2 - depth
        teacher_CD = hidden_TBD[1 + depth : -1].flatten(0, 1).index_select(0, chosen_C)
        draft_CD = state_SBD[:positions].flatten(0, 1).index_select(0, chosen_C)
        with mixed_context(model.is_mixed):
            with torch.no_grad():
                teacher_logprobs_CV = torch.log_softmax(head_logits(teacher_CD, head_VD), dim=-1)
            draft_logits_CV = head_logits(draft_CD, head_VD)
        agrees_C = draft_logits_CV.detach().argmax(-1) == teacher_logprobs_CV.argmax(-1)
        yield distillation_kl(draft_logits_CV, teacher_logprobs_CV), agrees_C


def draft_divergence(
    model: TrainerModel,
    hidden_TBD: Tensor,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    *,
    reaches_trunk: bool = False,
) -> Tensor:
    """Returns the concatenated KL of all depths."""
    rows = hidden_TBD, tokens_BT, mask_BT
    found = compare_drafts(model, *rows, reaches_trunk=reaches_trunk)
    return torch.cat([kl_C for kl_C, _ in found])
