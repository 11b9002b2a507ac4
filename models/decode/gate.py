"""Whether to draft, and how, from measured gain.

Without a lookup d drafts with d layers: the choices are tried by turns and the fastest is kept.
With one 1 drafts as the speculator sees fit, which it does only where it expects that to pay: the
gate watches whether it does. Choices are compared in stretches of steps, not step by step: a draft
drives the trunk's weights out of the processor's caches, and the plain steps behind it pay for
that. Batch sizes are measured apart.
"""

from collections import deque

import numpy as np

_STRETCH_STEPS = 8  # consecutive steps of one choice while it is tried
_SETTLING_STEPS = 2  # first steps of a stretch, which pay for the choice before
_PROBE_ROUNDS = 2  # stretches of each choice in a probe
_IDLE_STEPS = 32  # that pass unmeasured once plain decoding is chosen
_WINDOW_STEPS = 192  # measurements a choice that the gate looks back on
_FIRST_RECONSIDER_STEPS = 128  # until a stretch of plain steps while drafting; doubles
_LAST_RECONSIDER_STEPS = 512
_FIRST_PROBE_INTERVAL_STEPS = 1024
_LAST_PROBE_INTERVAL_STEPS = 16_384  # choices that keep losing are tried ever less often
_FIRST_WATCHED_STEPS = 64  # of drafting, until the first plain stretch
_WATCHED_STEPS = 512  # between plain stretches
_FIRST_PAUSE_STEPS = 512  # grows fourfold up to the last probe interval
_MIN_GAIN_RATIO = 1.05  # drafting must beat plain decoding by more than noise
_HOPELESS_RATIO = 0.75  # of the plain rate: below it a choice is tried no further in a probe
_PROBE_INTERVAL_GROWTH = 4
_OUTLIER_RATIO = 3.0  # a step that took longer than so many medians was interrupted


class SpeculationGate:
    """Picks the choice with the most measured tokens a second."""

    def __init__(self, max_depth: int, max_batch: int, *, has_lookup: bool = False) -> None:
        self.max_depth = max_depth
        self.max_batch = max_batch
        self._has_lookup = has_lookup
        self.reset()

    def reset(self) -> None:
        """Forgets every measurement."""
        self._courses: dict[int, _Trial | _Watch] = {}
        self.verified_at_depth = np.zeros(self.max_depth, dtype=np.int64)
        self.accepted_at_depth = np.zeros(self.max_depth, dtype=np.int64)

    def choose(self, batch: int) -> int:
        """The choice for the next step."""
        return 0 if batch > self.max_batch else self._course(batch).next_choice()

    def idle_steps(self, batch: int) -> int:
        """How many plain steps may follow without being chosen or recorded: none while choices are
        compared. They count as steps.
        """
        return self._course(batch).idle_steps() if batch <= self.max_batch else _IDLE_STEPS

    def record(self, batch: int, choice: int, seconds: float, tokens: int) -> None:
        """Adds one decode-only step."""
        if batch <= self.max_batch:
            self._course(batch).record(choice, seconds / batch, tokens / batch)

    def count_accepted(self, accepted_B: np.ndarray, depth: int) -> None:
        """Counts, for each draft place, how often it was looked at (all before it accepted) and how
        often it held.
        """
        for place in range(depth):
            self.verified_at_depth[place] += int((accepted_B >= place).sum())
            self.accepted_at_depth[place] += int((accepted_B > place).sum())

    def preferred(self, batch: int) -> int:
        """The choice that measured best so far; 0 is plain decoding."""
        return self._course(batch).best if batch <= self.max_batch else 0

    def acceptance(self) -> list[float]:
        """Share accepted a draft place, given that the places before it were."""
        return [
            float(accepted / verified) if verified else 0.0
            for accepted, verified in zip(
                self.accepted_at_depth, self.verified_at_depth, strict=True
            )
        ]

    def _course(self, batch: int) -> "_Trial | _Watch":
        size = (batch - 1).bit_length()
        if size not in self._courses:
            self._courses[size] = _Watch() if self._has_lookup else _Trial(self.max_depth + 1)
        return self._courses[size]


class _Steps:
    """The last steps of one choice."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_WINDOW_STEPS)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, seconds: float, tokens: float) -> None:
        self._steps.append((seconds, tokens))

    def clear(self) -> None:
        self._steps.clear()

    def rate(self, caution: float) -> float:
        """Tokens a second; 0 when never tried. `caution` is the standard errors that are taken off
        the tokens: a few lucky drafts are no gain yet.
        """
        if not self._steps:
            return 0.0
        seconds, tokens = np.array(self._steps).T
        gained = tokens.mean() - caution * tokens.std() * len(tokens) ** -0.5
        spent = np.minimum(seconds, _OUTLIER_RATIO * np.median(seconds)).mean()
        return float(gained / spent)


class _Trial:
    """The choices of one batch size by turns, then the best of them, and again ever less often."""

    def __init__(self, choices: int) -> None:
        self.best = 0
        self._steps = [_Steps() for _ in range(choices)]
        self._interval_steps = _FIRST_PROBE_INTERVAL_STEPS
        self._steps_until_probe = 0
        self._reconsider_steps = _FIRST_RECONSIDER_STEPS
        self._steps_until_plain = 0
        self._last_choice, self._run_steps = -1, 0
        self._probed: list[int] = []  # the choices of the stretches to come, the next one last
        self._stretch_steps_left = 0
        self._start_probe()

    def next_choice(self) -> int:
        """Every choice in turn while probing; else the best, with a plain stretch now and then."""
        if self._probed:
            return self._probed[-1]
        return 0 if self._steps_until_plain < _STRETCH_STEPS else self.best

    def idle_steps(self) -> int:
        if self._probed or self.best != 0:
            return 0
        self._steps_until_probe -= _IDLE_STEPS
        return _IDLE_STEPS

    def record(self, choice: int, seconds: float, tokens: float) -> None:
        self._run_steps = self._run_steps + 1 if choice == self._last_choice else 1
        self._last_choice = choice
        if self._run_steps > _SETTLING_STEPS:
            self._steps[choice].add(seconds, tokens)
        if self._probed:
            self._stretch_steps_left -= 1
            if not self._stretch_steps_left:
                self._end_stretch()
            return
        self._steps_until_probe -= 1
        if self._steps_until_probe <= 0:
            self._start_probe()
            return
        self._steps_until_plain -= 1
        if self._steps_until_plain <= 0:
            if self._steps[self.best].rate(0.0) <= self._steps[0].rate(0.0):
                self.best = 0
            self._wait_for_plain()

    def _start_probe(self) -> None:
        self._probed = list(reversed(range(len(self._steps)))) * _PROBE_ROUNDS
        self._stretch_steps_left = _STRETCH_STEPS

    def _end_stretch(self) -> None:
        choice = self._probed.pop()
        self._stretch_steps_left = _STRETCH_STEPS
        if self._steps[choice].rate(0.0) < _HOPELESS_RATIO * self._steps[0].rate(0.0):
            self._probed = [other for other in self._probed if other != choice]
        if not self._probed:
            self._decide()

    def _wait_for_plain(self) -> None:
        self._steps_until_plain = self._reconsider_steps
        self._reconsider_steps = min(2 * self._reconsider_steps, _LAST_RECONSIDER_STEPS)

    def _decide(self) -> None:
        rates = [steps.rate(1.0) for steps in self._steps]
        winner = int(np.argmax(rates))
        winner = winner if rates[winner] > _MIN_GAIN_RATIO * rates[0] else 0
        is_settled = winner == self.best
        self._interval_steps = (
            min(_PROBE_INTERVAL_GROWTH * self._interval_steps, _LAST_PROBE_INTERVAL_STEPS)
            if is_settled
            else _FIRST_PROBE_INTERVAL_STEPS
        )
        if not is_settled:
            self._reconsider_steps = _FIRST_RECONSIDER_STEPS
        self.best = winner
        self._steps_until_probe = self._interval_steps
        self._wait_for_plain()


class _Watch:
    """Drafting, against plain stretches; it pauses while it is surely slower."""

    def __init__(self) -> None:
        self.best = 1
        self._plain, self._drafting = _Steps(), _Steps()
        self._steps_left = _FIRST_WATCHED_STEPS  # until a plain stretch, or of a pause
        self._stretch_steps_left = 0
        self._pause_steps = _FIRST_PAUSE_STEPS

    def next_choice(self) -> int:
        """1, but in plain stretches and pauses."""
        return 0 if self._stretch_steps_left else self.best

    def idle_steps(self) -> int:
        if self.best or self._stretch_steps_left:
            return 0
        self._steps_left -= _IDLE_STEPS
        return _IDLE_STEPS

    def record(self, choice: int, seconds: float, tokens: float) -> None:
        if choice:
            self._drafting.add(seconds, tokens)
        elif self._stretch_steps_left <= _STRETCH_STEPS:
            self._plain.add(seconds, tokens)
        if self._stretch_steps_left:
            self._stretch_steps_left -= 1
            if not self._stretch_steps_left:
                self._decide()
            return
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        if self.best:
            self._stretch_steps_left = _SETTLING_STEPS + _STRETCH_STEPS
        else:  # the pause is over
            self.best = 1
            self._drafting.clear()
            self._steps_left = _FIRST_WATCHED_STEPS

    def _decide(self) -> None:
        if self._drafting.rate(-2.0) < self._plain.rate(0.0):
            self.best = 0
            self._steps_left = self._pause_steps
            self._pause_steps = min(4 * self._pause_steps, _LAST_PROBE_INTERVAL_STEPS)
        else:
            self._steps_left = _WATCHED_STEPS
            if self._drafting.rate(0.0) > self._plain.rate(0.0):
                self._pause_steps = _FIRST_PAUSE_STEPS
