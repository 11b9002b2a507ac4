"""Cost of a decode step by the number of drafts that it verifies.

Each number of drafts has its own mean, blended with a line that is fitted to all means: the more
measurements, the more the mean counts. The line has an offset, since several rows may run other
code than one row. Unmeasured drafts count as cheap, so that they are tried.

Shapes: w drafts of the lookup in a step, 0 to k.
"""

import numpy as np

_FADING = 1 - 1 / 200  # factor on a measurement's weight per later step of its kind
_UNMEASURED_SLOPE_RATIO = 0.1  # assumed extra cost per draft, relative to a plain step
_DRAFT_MARGIN_RATIO = 1.05  # factor on the measured cost of a step with drafts
_LEAST_SLOPE_RATIO = 0.01
_LINE_STEPS = 8.0  # weight of the line in the blend, in measurements
_OUTLIER_RATIO = 2.0  # a step this many times slower than expected was interrupted
_FIRST_STEPS = 4  # of these only the fastest counts, since others may have loaded code
_MAX_STEPS_BETWEEN_FITS = 256


class StepCosts:
    """Costs of one batch size and number of draft layers."""

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
        if expected and seconds > _OUTLIER_RATIO * expected:
            seconds = _OUTLIER_RATIO * expected
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
