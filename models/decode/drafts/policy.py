"""Drafting policy: whether a decode step drafts, and with how many draft layers.

Two questions are answered separately for each batch size (rounded up to a power of two):

- With how many layers? The number with the most expected tokens per measured cost of a step
  (`StepCosts`), given the share of each layer's drafts that held. An unmeasured number counts as
  cheap and certain, so that it is tried. Rejected layers are tried again after ever longer times.
- Is drafting faster than plain decoding at all? Stretches of plain steps are compared with the
  drafting between them. Single steps would not be comparable: a draft evicts the trunk's weights
  from the processor's caches, which slows the next plain step. While drafting is surely slower it
  pauses.
"""

from collections import deque

import numpy as np

_FADING = 1 - 1 / 200  # factor on a measurement's weight per later step of its kind
_UNMEASURED_SLOPE_RATIO = 0.1  # assumed extra cost per draft, relative to a plain step
_DRAFT_MARGIN_RATIO = 1.05  # factor on the measured cost of a step with drafts
_LEAST_SLOPE_RATIO = 0.01
_LINE_STEPS = 8.0  # weight of the line in the blend, in measurements
_INTERRUPTED_RATIO = 2.0  # a step this many times slower than expected was interrupted
_FIRST_STEPS = 4  # of these only the fastest counts, since others may have loaded code
_MAX_STEPS_BETWEEN_FITS = 256


class StepCosts:
    """Cost of a step by the number of lookup drafts (w), for one batch size and number of draft layers.

    Each number of drafts has its own mean, blended with a line that is fitted to all means: the more
    measurements, the more the mean counts. The line has an offset, since several rows may run other
    code than one row. Unmeasured drafts count as cheap, so that they are tried.
    """

    def __init__(self, most_drafts: int) -> None:
        self._drafts_w = np.arange(most_drafts + 1)
        self.relative_w = np.ones(most_drafts + 1, dtype=np.float32)
        self._expected = [0.0] * (most_drafts + 1)  # seconds; 0: nothing is known
        self._seconds = [0.0] * (most_drafts + 1)  # means
        self._weights = [0.0] * (most_drafts + 1)  # measurements, faded
        self._steps, self._next_fit = 0, 1

    @property
    def plain_seconds(self) -> float:
        """Mean seconds of a step without lookup drafts. 0 before the first."""
        return self._seconds[0]

    def record(self, drafts: int, seconds: float) -> None:
        """Adds the measured time of one step."""
        plain = self.plain_seconds
        if drafts and not plain:
            return
        expected = self._expected[drafts] or plain * (1 + _UNMEASURED_SLOPE_RATIO * drafts)
        if expected and seconds > _INTERRUPTED_RATIO * expected:
            seconds = _INTERRUPTED_RATIO * expected
        weight = self._weights[drafts] = self._weights[drafts] * _FADING + 1
        if 1 < weight < _FIRST_STEPS:
            self._seconds[drafts] = min(self._seconds[drafts], seconds)
        else:
            self._seconds[drafts] += (seconds - self._seconds[drafts]) / weight
        self._steps += 1
        if self._steps >= self._next_fit:
            self._next_fit = self._steps + min(1 + self._steps // 2, _MAX_STEPS_BETWEEN_FITS)
            self._fit()

    def _fit(self) -> None:
        """Fits the line to the means and to one guess at each end of it."""
        plain = self.plain_seconds
        if plain <= 0:
            return
        drafts_w, means_w, weights_w = (
            self._drafts_w,
            np.array(self._seconds),
            np.array(self._weights),
        )
        guesses = np.array([1, drafts_w[-1]])
        x = np.concatenate([drafts_w[1:], guesses])
        y = np.concatenate([means_w[1:], plain * (1 + _UNMEASURED_SLOPE_RATIO * guesses)])
        weights = np.concatenate([weights_w[1:], [1.0, 1.0]])
        x_mean, y_mean = np.average(x, weights=weights), np.average(y, weights=weights)
        spread = float((weights * (x - x_mean) ** 2).sum())
        slope = float((weights * (x - x_mean) * (y - y_mean)).sum()) / spread if spread else 0.0
        line_w = y_mean + max(slope, _LEAST_SLOPE_RATIO * plain) * (drafts_w - x_mean)
        seconds_w = (line_w * _LINE_STEPS + means_w * weights_w) / (_LINE_STEPS + weights_w)
        seconds_w[0] = plain
        self._expected = seconds_w.tolist()
        relative_w = np.maximum(_DRAFT_MARGIN_RATIO * seconds_w / plain, 1.0)
        relative_w[0] = 1.0
        self.relative_w = relative_w.astype(np.float32)


_STRETCH_STEPS = 8  # consecutive plain steps that drafting is compared with
_SETTLING_STEPS = 2  # first steps of a stretch, slowed by the drafts before and not measured
_FIRST_WATCHED_STEPS = 64  # of drafting, until the first plain stretch
_WATCHED_STEPS = 512  # between plain stretches
_FIRST_PAUSE_STEPS = 512  # without drafts; also until layers judged too slow are tried again
_LAST_PAUSE_STEPS = 16_384
_PAUSE_GROWTH = 4
_FIRST_REST_STEPS = 4  # without drafting, after as many steps in a row that found none; doubles
_LAST_REST_STEPS = 64
_WINDOW_STEPS = 192  # measurements that a comparison looks back on
_STEPS_PER_WEIGHING = 32
_PRIOR_DRAFTS = 8  # drafts per layer that are assumed to have held before the first
_GAIN_RATIO = 1.05  # required ratio of expected tokens with layers to those without
_OUTLIER_RATIO = 3.0  # a step slower than this many medians was interrupted


class DraftPolicy:
    """Decisions of one engine, from the costs and acceptance that it measured."""

    def __init__(
        self, max_layers: int, max_batch: int, max_copies: int, *, always_drafts: bool = False
    ) -> None:
        """`always_drafts`: uses all layers in every step, whatever was measured."""
        self.max_layers, self.max_batch = max_layers, max_batch
        self._always_drafts = always_drafts
        self._max_copies = max_copies
        self._batches: dict[int, _BatchPolicy] = {}
        self._verified_L = np.zeros(max_layers, dtype=np.int64)
        self._held_L = np.zeros(max_layers, dtype=np.int64)

    def should_measure(self, batch: int) -> bool:
        """Whether the next step must be recorded. False: it is plain."""
        if self._always_drafts:
            return True
        if batch > self.max_batch:
            return False
        at = self._at(batch)
        if at.is_retry_due():
            at.forget_layers()
            self._verified_L[:] = self._held_L[:] = 0
        return not at.is_resting()

    def should_draft(self, batch: int) -> bool:
        """Whether the next step drafts, if there is anything to draft."""
        return self._always_drafts or self._at(batch).is_drafting

    def choose_layers(self, batch: int, lookup_rate: float) -> int:
        """Draft layers of the next step. 0 unless some number of layers is expected to give clearly
        more tokens per plain step's time than `lookup_rate`, the lookup's rate without layers.
        """
        at = self._at(batch)
        if self._always_drafts:
            return self.max_layers
        return at.best_layers if at.best_rate > _GAIN_RATIO * max(1.0, lookup_rate) else 0

    def count_proposal(self, batch: int, *, has_drafts: bool) -> None:
        """Counts whether there was anything to draft. Drafting rests after several misses in a row."""
        self._at(batch).count_proposal(has_drafts=has_drafts)

    def costs(self, batch: int, layers: int) -> StepCosts:
        """Costs of steps with `layers` draft layers, by the number of lookup drafts after theirs."""
        return self._at(batch).costs[layers]

    def record(self, batch: int, layers: int, copies: int, seconds: float, tokens: int) -> None:
        """Adds one measured decode-only step. Seconds and tokens are counted per slot."""
        at = self._at(batch)
        at.costs[layers].record(copies, seconds / batch)
        at.compare(seconds / batch, tokens / batch)
        if layers or at.is_depth_choice_due():
            at.choose_draft_depth(
                (self._held_L + _PRIOR_DRAFTS) / (self._verified_L + _PRIOR_DRAFTS)
            )

    def count_accepted(self, accepted_B: np.ndarray, layers: int) -> None:
        """Counts per draft layer how often its draft was reached and how often it held."""
        for depth in range(layers):
            self._verified_L[depth] += int((accepted_B >= depth).sum())
            self._held_L[depth] += int((accepted_B > depth).sum())

    def acceptance(self) -> list[float]:
        """Share of each layer's drafts that held, given that the drafts before did."""
        pairs = zip(self._held_L, self._verified_L, strict=True)
        return [float(held / seen) if seen else 0.0 for held, seen in pairs]

    def _at(self, batch: int) -> "_BatchPolicy":
        size = (batch - 1).bit_length()
        if size not in self._batches:
            self._batches[size] = _BatchPolicy(self.max_layers, self._max_copies)
        return self._batches[size]


class _BatchPolicy:
    """Measurements and decisions for one batch size."""

    def __init__(self, max_layers: int, max_copies: int) -> None:
        self.max_layers, self._max_copies, self._records = max_layers, max_copies, 0
        self.costs = [StepCosts(max_copies) for _ in range(max_layers + 1)]  # by layers
        self.best_layers = max_layers
        self.best_rate = float("inf") if max_layers else 0.0  # tokens per plain step's time
        self._retry_steps = self._next_retry_steps = _FIRST_PAUSE_STEPS
        self._misses, self._rest_steps, self._next_rest_steps = 0, 0, _FIRST_REST_STEPS
        self._plain, self._drafting = _RateWindow(), _RateWindow()
        self._is_paused = False
        self._steps_left = _FIRST_WATCHED_STEPS  # until a plain stretch, or of a pause
        self._stretch_steps_left = (
            _SETTLING_STEPS + _STRETCH_STEPS
        )  # plain steps are measured first
        self._next_pause_steps = _FIRST_PAUSE_STEPS

    @property
    def is_drafting(self) -> bool:
        """False in a pause and in a plain stretch."""
        return not self._is_paused and not self._stretch_steps_left

    def is_resting(self) -> bool:
        """Whether the next step is plain and unmeasured. Must be called once per step."""
        if self._is_paused and self._steps_left > 1:
            self._steps_left -= 1
            return True
        if not self._rest_steps:
            return False
        self._rest_steps -= 1
        self._retry_steps -= 1
        return True

    def count_proposal(self, *, has_drafts: bool) -> None:
        if has_drafts:
            self._misses, self._next_rest_steps = 0, _FIRST_REST_STEPS
            return
        self._retry_steps -= 1
        self._misses += 1
        if self._misses == _FIRST_REST_STEPS:
            self._misses, self._rest_steps = 0, self._next_rest_steps
            self._next_rest_steps = min(2 * self._next_rest_steps, _LAST_REST_STEPS)

    def is_retry_due(self) -> bool:
        """Whether layers were judged too slow so long ago that they should be tried again."""
        return self._retry_steps <= 0

    def forget_layers(self) -> None:
        """Marks all layers as untried. The next call comes after a longer time."""
        self._next_retry_steps = min(_PAUSE_GROWTH * self._next_retry_steps, _LAST_PAUSE_STEPS)
        self._retry_steps = self._next_retry_steps
        self.costs[1:] = [StepCosts(self._max_copies) for _ in range(self.max_layers)]
        self.best_layers = self.max_layers
        self.best_rate = float("inf") if self.max_layers else 0.0

    def is_depth_choice_due(self) -> bool:
        """Whether to choose again although no layer ran: the cost of plain steps changes too."""
        self._records += 1
        return self.max_layers > 0 and self._records % _STEPS_PER_WEIGHING == 0

    def choose_draft_depth(self, acceptance_L: np.ndarray) -> None:
        """Finds the number of layers with the most expected tokens per plain step's time."""
        plain = self.costs[0].plain_seconds
        if not plain:
            return
        self.best_layers, self.best_rate, held = 0, 0.0, 1.0
        tokens = 1.0
        for layers, share in enumerate(acceptance_L.tolist(), start=1):
            held *= share
            tokens += held
            seconds = self.costs[layers].plain_seconds or plain
            if tokens * plain / seconds > self.best_rate:
                self.best_layers, self.best_rate = layers, tokens * plain / seconds

    def compare(self, seconds: float, tokens: float) -> None:
        """Adds one step to the comparison of drafting with plain decoding."""
        if self.is_drafting:
            self._drafting.add(seconds, tokens)
        elif 0 < self._stretch_steps_left <= _STRETCH_STEPS:
            self._plain.add(seconds, tokens)
        if self._stretch_steps_left:
            self._stretch_steps_left -= 1
            if not self._stretch_steps_left:
                self._decide()
            return
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        if self._is_paused:
            self._is_paused = False
            self._drafting.clear()
            self._steps_left = _FIRST_WATCHED_STEPS
        else:
            self._stretch_steps_left = _SETTLING_STEPS + _STRETCH_STEPS

    def _decide(self) -> None:
        if 0 < self._drafting.rate(-2.0) < self._plain.rate(0.0):
            self._is_paused, self._steps_left = True, self._next_pause_steps
            self._next_pause_steps = min(_PAUSE_GROWTH * self._next_pause_steps, _LAST_PAUSE_STEPS)
            return
        self._steps_left = _WATCHED_STEPS
        if self._drafting.rate(0.0) > self._plain.rate(0.0):
            self._next_pause_steps = _FIRST_PAUSE_STEPS


class _RateWindow:
    """Tokens per second of the latest steps of one kind."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_WINDOW_STEPS)

    def add(self, seconds: float, tokens: float) -> None:
        self._steps.append((seconds, tokens))

    def clear(self) -> None:
        self._steps.clear()

    def rate(self, caution: float) -> float:
        """Tokens per second, less `caution` standard errors of the tokens. 0 without steps."""
        if not self._steps:
            return 0.0
        seconds, tokens = np.array(self._steps).T
        gained = tokens.mean() - caution * tokens.std() * len(tokens) ** -0.5
        spent = np.minimum(seconds, _OUTLIER_RATIO * np.median(seconds)).mean()
        return float(gained / spent) if spent else 0.0
