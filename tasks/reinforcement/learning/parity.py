"""Parity of engine and trainer: each version's tokens, scored under that version's weights.

The step itself scores the tokens of the trainer's current version. Some tokens of each earlier
version that is still in memory are scored again.

Shapes: B rows, T tokens, N sampled tokens.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from ostinato.models.decode.config import Precision
from ostinato.models.network.adapters import weights_put_back
from ostinato.models.network.build import TrainerModel
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.batches.packing import Microbatch, pack
from ostinato.tasks.reinforcement.learning.batches.scoring import compute_hidden, score_batch
from ostinato.tasks.reinforcement.learning.config import (
    PARITY_ALARM_K3,
    LearningConfig,
    RouterReplayConfig,
)
from ostinato.tasks.reinforcement.learning.report import (
    Mismatch,
    Parity,
    TokenScores,
    measure_mismatch,
)

# By version, a function that reads a tensor by canonical name. All ranks call it together.
EarlierWeights = Mapping[int, Callable[[str], Tensor]]

OUR_ALARM_K3 = PARITY_ALARM_K3["local", Precision.FP32]


class StepParity:
    """Parity of one step."""

    def __init__(self, config: LearningConfig, step: int, weight_version: int) -> None:
        self._config, self._step, self._version = config, step, weight_version
        self._known = {weight_version}
        self._tokens_by_age: Counter[int] = Counter()
        # by whether the cache was kept across a weight update
        self._trainer: dict[bool, list[np.ndarray]] = {False: [], True: []}
        self._rollout: dict[bool, list[np.ndarray]] = {False: [], True: []}

    @torch.no_grad()
    def score_earlier(
        self, model: TrainerModel, samples: Sequence[Sample], earlier: EarlierWeights
    ) -> None:
        """Scores some tokens of each earlier version under its weights. The model gets its own weights back."""
        self._known |= earlier.keys()
        tokens = self._config.parity.tokens
        chosen = {
            version: choose_samples(samples, version, tokens, salt=self._step)
            for version in sorted(earlier)
            if version < self._version
        }
        if not any(chosen.values()):
            return
        with weights_put_back(model):
            for version, picked in chosen.items():
                if picked:
                    model.read_weights(earlier[version])
                    self._score(model, picked, version)
        model.routers.take_replay_counts()

    def measure(self, samples: Sequence[Sample], own: TokenScores) -> Parity:
        """Parity of all scored tokens. `own`: scores of the step itself."""
        is_own_N = own.weight_versions_N == self._version
        self._add(
            self._version,
            own.trainer_logprobs_N[is_own_N],
            own.rollout_logprobs_N[is_own_N],
            own.is_kept_cache_N[is_own_N].astype(bool),
        )
        return Parity(
            one_cache=self._mismatch(is_kept=False),
            kept_cache=self._mismatch(is_kept=True),
            tokens_by_age=dict(sorted(self._tokens_by_age.items())),
            tokens_not_measured=sum(
                int(
                    (
                        ~np.isin(segment.weight_versions_T[segment.loss_mask_T], list(self._known))
                    ).sum()
                )
                for segment in (sample.segment for sample in samples)
            ),
            alarm_k3=self._config.parity.alarm_k3 or OUR_ALARM_K3,
            alarm_kept_cache_k3=self._config.parity.alarm_kept_cache_k3,
        )

    def _score(self, model: TrainerModel, samples: Sequence[Sample], version: int) -> None:
        for batch in pack(samples, [0.0] * len(samples), self._config.row_packing):
            replay = self._config.router_replay
            hidden_TBD = compute_hidden(model, batch, replay)
            logprobs_BT, _ = score_batch(model, batch, hidden_TBD, with_entropy=False)
            is_wanted_BT = batch.loss_mask_BT & (batch.weight_versions_BT == version)
            self._add(
                version,
                logprobs_BT.cpu().numpy()[is_wanted_BT],
                batch.rollout_logprobs_BT[is_wanted_BT],
                batch.is_kept_cache_BT[is_wanted_BT],
            )

    def _add(
        self,
        version: int,
        trainer_N: np.ndarray,
        rollout_N: np.ndarray,
        is_kept_cache_N: np.ndarray,
    ) -> None:
        for is_kept in (False, True):
            chosen_N = is_kept_cache_N == is_kept
            self._trainer[is_kept].append(trainer_N[chosen_N])
            self._rollout[is_kept].append(rollout_N[chosen_N])
        if len(trainer_N):
            self._tokens_by_age[self._version - version] += len(trainer_N)

    def _mismatch(self, *, is_kept: bool) -> Mismatch | None:
        trainer, rollout = self._trainer[is_kept], self._rollout[is_kept]
        if not any(map(len, trainer)):
            return None
        return measure_mismatch(np.concatenate(trainer), np.concatenate(rollout))


def choose_samples(
    samples: Sequence[Sample], version: int, tokens: int, *, salt: int
) -> list[Sample]:
    """Random samples that together hold about `tokens` tokens of a version. Each salt draws others."""
    holding = [sample for sample in samples if _count(sample, version)]
    holding.sort(key=lambda sample: xxhash.xxh3_64_intdigest(f"{salt}:{sample.sample_id}".encode()))
    chosen: list[Sample] = []
    while holding and sum(_count(sample, version) for sample in chosen) < tokens:
        chosen.append(holding.pop())
    return chosen


def _count(sample: Sample, version: int) -> int:
    segment = sample.segment
    return int((segment.weight_versions_T[segment.loss_mask_T] == version).sum())


@torch.no_grad()
def mismatch_without_replay(
    model: TrainerModel,
    microbatches: Sequence[Microbatch],
    replay: RouterReplayConfig,
    weight_version: int,
) -> Mismatch | None:
    """Mismatch of the log-probabilities of the same weights without router replay, which shows the effect of replay.
    None: not requested, or no token of this version.
    """
    trainer, rollout, seen_tokens = [], [], 0
    model.train()
    for batch in microbatches:
        if seen_tokens >= replay.compared_tokens:
            break
        hidden_TBD = compute_hidden(model, batch, None)
        logprobs_BT, _ = score_batch(model, batch, hidden_TBD, with_entropy=False)
        equal_BT = batch.loss_mask_BT & (batch.weight_versions_BT == weight_version)
        trainer.append(logprobs_BT.cpu().numpy()[equal_BT])
        rollout.append(batch.rollout_logprobs_BT[equal_BT])
        seen_tokens += int(equal_BT.sum())
    if not seen_tokens:
        return None
    return measure_mismatch(np.concatenate(trainer), np.concatenate(rollout))
