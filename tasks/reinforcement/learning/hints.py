"""Self-distillation from a hint: the policy with the hint in its context teaches the policy without it.

The loss is KL(policy || detached policy after the hint) at each token of one turn, over the whole
vocabulary, as in SDPO (Huebotter et al. 2026, arXiv:2601.20802) and the textual feedback of Composer
2.5. The teacher's routers choose, because its context is new; the student replays recorded routes.

Shapes: B rows, T tokens, N tokens of the turns, V vocabulary, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.infra.agent.transcript import MISSING_ROUTE, Segment
from ostinato.models.device import on_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.network.head import head_logits
from ostinato.models.network.mixed import mixed_context
from ostinato.tasks.records import Hint, Sample
from ostinato.tasks.reinforcement.learning.batches.packing import Microbatch, pack
from ostinato.tasks.reinforcement.learning.batches.scoring import compute_hidden
from ostinato.tasks.reinforcement.learning.config import PackingConfig, RouterReplayConfig


@dataclass(frozen=True, slots=True)
class HintedRows:
    """The same turns without and with their hints. The loss masks select the turns."""

    student: Microbatch
    teacher: Microbatch


def pack_hinted(samples: Sequence[Sample], config: PackingConfig) -> list[HintedRows]:
    """Rows of all samples with a hint, except those that with it do not fit the largest bucket."""
    students, teachers = [], []
    for sample in samples:
        hint = sample.hint
        if hint is None:
            continue
        turn = sample.segment.token_ids_T[hint.turn_start : hint.turn_end]
        if len(hint.context_tokens) + len(turn) <= config.bucket_tokens[-1]:
            students.append(sample.model_copy(update={"segment": _until_turn(sample, hint)}))
            teachers.append(sample.model_copy(update={"segment": _hinted(sample, hint)}))
    rows = []
    for student in pack(students, [0.0] * len(students), config):
        order = student.sample_indices_B.tolist()
        # one microbatch for all of them; `pack` orders the rows anew
        [teacher] = pack(
            [teachers[index] for index in order],
            [0.0] * len(order),
            config.model_copy(update={"microbatch_tokens": len(order) * config.bucket_tokens[-1]}),
        )
        rows.append(HintedRows(student, teacher))
    return rows


def hint_divergence(model: TrainerModel, rows: HintedRows, replay: RouterReplayConfig) -> Tensor:
    """kl_N: KL(policy || policy after the hint) in nats at each token of the students' turns."""
    with torch.no_grad():
        teacher = _turn_logprobs(model, rows.teacher, replay)
    by_row = dict(zip(rows.teacher.sample_indices_B.tolist(), teacher, strict=True))
    teacher_NV = torch.cat([by_row[row] for row in range(len(by_row))])
    student_NV = torch.cat(_turn_logprobs(model, rows.student, replay))
    return (student_NV.exp() * (student_NV - teacher_NV)).sum(-1)


def _turn_logprobs(
    model: TrainerModel, batch: Microbatch, replay: RouterReplayConfig
) -> list[Tensor]:
    """For each row, log-probabilities of the whole vocabulary at each token of its turn."""
    hidden_TBD = compute_hidden(model, batch, replay)
    found = []
    for row, mask_T in enumerate(batch.loss_mask_BT):
        before = on_device(np.flatnonzero(mask_T) - 1)
        with mixed_context(model.is_mixed):
            logits_NV = head_logits(hidden_TBD[before, row], model.head_VD)
        found.append(torch.log_softmax(logits_NV / float(batch.temperatures_B[row]), dim=-1))
    return found


def _until_turn(sample: Sample, hint: Hint) -> Segment:
    """The sampled segment up to the end of the turn, with loss on the turn only."""
    segment, end = sample.segment, hint.turn_end
    mask_T = np.zeros(end, dtype=bool)
    mask_T[hint.turn_start :] = True
    arrays = {
        name: getattr(segment, name)[:end]
        for name in (
            "token_ids_T",
            "logprobs_T",
            "weight_versions_T",
            "cache_versions_T",
            "routed_experts_TLK",
        )
    }
    return segment.model_copy(update=arrays | {"loss_mask_T": mask_T})


def _hinted(sample: Sample, hint: Hint) -> Segment:
    """The turn after the context with the hint. There are no routes to replay: no engine has read this context."""
    segment = sample.segment
    turn = slice(hint.turn_start, hint.turn_end)
    tokens_T = np.concatenate(
        [np.asarray(hint.context_tokens, dtype=np.int32), segment.token_ids_T[turn]]
    )
    mask_T = np.arange(len(tokens_T)) >= len(hint.context_tokens)
    none_T = np.where(mask_T, 0, -1).astype(np.int64)
    routes_shape = (len(tokens_T), *segment.routed_experts_TLK.shape[1:])
    return segment.model_copy(
        update={
            "token_ids_T": tokens_T,
            "loss_mask_T": mask_T,
            "logprobs_T": np.zeros(len(tokens_T), dtype=np.float32),
            "weight_versions_T": none_T,
            "cache_versions_T": none_T,
            "routed_experts_TLK": np.full(routes_shape, MISSING_ROUTE, dtype=np.int16),
        }
    )
