"""Builds the token record of one conversation while it grows.

`SegmentBuilder` makes one `Segment` with parallel arrays from the tokens of prompt and results and from `Generation`s,
without encoding any text again. Shapes: T tokens, L MoE layers, K experts per token.
"""

from collections.abc import Sequence

import numpy as np

from ostinato.infra.agent.transcript import MISSING_ROUTE, SamplingDistribution, Segment
from ostinato.infra.platform.errors import EngineError
from ostinato.models.decode.protocol import Generation


class SegmentBuilder:
    """The tokens of one segment so far."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingDistribution,
        opening: Segment | None = None,
    ) -> None:
        """`sampling`: settings of all answers. `opening`: the earlier attempt's segment with the tokens `prompt_ids`."""
        self._sampling = sampling
        self._opening = opening
        self.token_ids: list[int] = list(prompt_ids)
        self._sampled: list[tuple[int, Generation]] = []

    def append_unsampled(self, token_ids: Sequence[int]) -> None:
        """Adds tokens of the template or of tool results."""
        self.token_ids.extend(token_ids)

    def drop_answer_header(self, num_tokens: int) -> None:
        """Removes the last template tokens, which were never sent to a model."""
        del self.token_ids[len(self.token_ids) - num_tokens :]

    def append_generation(self, generation: Generation) -> None:
        """Adds tokens that the model sampled after the present ones. EngineError for a malformed answer."""
        _check_answer(generation)
        self._sampled.append((len(self.token_ids), generation))
        self.token_ids.extend(generation.token_ids)

    def build(
        self,
        earlier: "Sequence[SegmentBuilder]" = (),
        context: "Sequence[SegmentBuilder]" = (),
    ) -> Segment:
        """The finished record. `earlier` and `context`: builders of the tokens that this one begins with. Tokens that
        `earlier` sampled are trained here too; those that `context` sampled are trained in another segment.
        """
        total = len(self.token_ids)
        trained = [part for builder in (*earlier, self) for part in builder._sampled]
        read = [part for builder in context for part in builder._sampled]
        loss_mask_T = np.zeros(total, dtype=bool)
        logprobs_T = np.zeros(total, dtype=np.float32)
        weight_versions_T = np.full(total, -1, dtype=np.int64)
        cache_versions_T = np.full(total, -1, dtype=np.int64)
        if self._opening is not None:  # without its routes: this attempt's engine routed it again
            start = len(self._opening.token_ids_T)
            loss_mask_T[:start] = self._opening.loss_mask_T
            logprobs_T[:start] = self._opening.logprobs_T
            weight_versions_T[:start] = self._opening.weight_versions_T
            cache_versions_T[:start] = self._opening.cache_versions_T
        routed = [generation.routed_experts for _, generation in (*read, *trained)]
        layers, experts = next((rows.shape[1:] for rows in routed if len(rows)), (0, 0))
        routed_experts_TLK = np.full((total, layers, experts), MISSING_ROUTE, dtype=np.int16)
        for _, generation in read:
            _fill_routes(routed_experts_TLK, generation)
        for start, generation in trained:
            end = start + len(generation.token_ids)
            loss_mask_T[start:end] = True
            logprobs_T[start:end] = generation.logprobs_T
            weight_versions_T[start:end] = generation.weight_versions_T
            oldest = generation.oldest_cache_version
            cache_versions_T[start:end] = generation.weight_versions_T if oldest is None else oldest
            _fill_routes(routed_experts_TLK, generation)
        return Segment(
            token_ids_T=np.asarray(self.token_ids, dtype=np.int32),
            loss_mask_T=loss_mask_T,
            logprobs_T=logprobs_T,
            weight_versions_T=weight_versions_T,
            cache_versions_T=cache_versions_T,
            routed_experts_TLK=routed_experts_TLK,
            sampling=self._sampling,
        )


def _check_answer(generation: Generation) -> None:
    """Raises EngineError unless each token has its id, log-probability and version. Packages add engines."""
    ids_T = np.asarray(generation.token_ids)
    answer = f"answer {generation.request_id} of the engine"
    if ids_T.size and not (ids_T.dtype.kind in "iu" and 0 <= ids_T.min() <= ids_T.max() < 2**31):
        raise EngineError(f"{answer} has token_ids {ids_T.tolist()!r:.200}, wanted ids from 0 on")
    rows = {"logprobs_T": generation.logprobs_T, "weight_versions_T": generation.weight_versions_T}
    for name, values in rows.items():
        if np.shape(values) != ids_T.shape:
            raise EngineError(
                f"{answer} has {name} of shape {np.shape(values)}, wanted {ids_T.shape}: one per token"
            )
        seen = np.asarray(values)
        if seen.dtype.kind not in "iuf" or not np.isfinite(seen).all():
            raise EngineError(f"{answer} has {name} {seen.tolist()!r:.200}, wanted finite numbers")


def _fill_routes(routed_experts_TLK: np.ndarray, generation: Generation) -> None:
    """Copies the routes of positions that have none yet.

    A position computed again after a weight swap keeps its first routes, because those led to the
    token that was sampled after it.
    """
    rows = generation.routed_experts
    if not rows.size:  # nothing new, or a model without experts
        return
    start = generation.route_offset
    target = routed_experts_TLK[start : start + len(rows)]
    missing = target[:, 0, 0] == MISSING_ROUTE
    target[missing] = rows[: len(target)][missing]
