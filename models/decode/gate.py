"""Whether to draft, and how, from measured gain.

Owns `SpeculationGate`. Enters: what each decode-only step cost and gave. Leaves: the choice for the
next step. Choices are numbers: 0 drafts nothing; without a lookup d drafts with d layers, with one
1 drafts as the speculator sees fit. The choice to beat is plain decoding without a lookup; with one
it is 1, which drafts only where that is expected to pay. Choices are compared in stretches of
steps, not step by step: a draft drives the trunk's weights out of the processor's caches, and the
plain steps behind it pay for that. Batch sizes are measured apart.
"""

from collections import deque

import numpy as np

_STRETCH_STEPS = 8  # consecutive steps of one choice while it is tried
_SETTLING_STEPS = 2  # first steps of a stretch, which pay for the choice before
_PROBE_ROUNDS = 2  # stretches of each choice in a probe
_WINDOW_STEPS = 192  # measurements a choice that the gate looks back on
_FIRST_RECONSIDER_STEPS = 128  # until a stretch of plain steps while drafting; doubles
_LAST_RECONSIDER_STEPS = 512
_FIRST_PROBE_INTERVAL_STEPS = 1024
_LAST_PROBE_INTERVAL_STEPS = 16_384  # choices that keep losing are tried ever less often
_MIN_GAIN_RATIO = 1.05  # another choice must beat the first one by more than noise
_HOPELESS_RATIO = 0.75  # of the first choice's rate: below it a probe ends early
_PROBE_INTERVAL_GROWTH = 4
_OUTLIER_RATIO = 3.0  # a step that took longer than so many medians was interrupted


class SpeculationGate:
    """Picks the choice with the most measured tokens a second."""

    def __init__(self, max_depth: int, max_batch: int, *, has_lookup: bool = False) -> None:
        self.max_depth = max_depth
        self.max_batch = max_batch
        self._base = int(has_lookup)
        self._choices = 2 if has_lookup else max_depth + 1
        self.reset()

    def reset(self) -> None:
        """Forgets every measurement."""
        self._courses: dict[int, _Course] = {}
        self.verified_at_depth = np.zeros(self.max_depth, dtype=np.int64)
        self.accepted_at_depth = np.zeros(self.max_depth, dtype=np.int64)

    def choose(self, batch: int) -> int:
        """The choice for the next step."""
        return 0 if batch > self.max_batch else self._course(batch).next_choice()

    def idle_steps(self, batch: int) -> int:
        """How many plain steps may follow without being chosen or recorded: none while choices are
        compared. They count as steps.
        """
        return self._course(batch).idle_steps() if batch <= self.max_batch else _STRETCH_STEPS

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

    def _course(self, batch: int) -> "_Course":
        size = (batch - 1).bit_length()
        if size not in self._courses:
            self._courses[size] = _Course(self._choices, self._base)
        return self._courses[size]


class _Course:
    """Measurements and probing schedule of one batch size."""

    def __init__(self, choices: int, base: int) -> None:
        self.best = base
        self._base = base
        self._choices = choices
        self._steps: list[deque[tuple[float, float]]] = [
            deque(maxlen=_WINDOW_STEPS) for _ in range(choices)
        ]
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
        self._steps_until_probe -= _STRETCH_STEPS
        return _STRETCH_STEPS

    def record(self, choice: int, seconds: float, tokens: float) -> None:
        self._run_steps = self._run_steps + 1 if choice == self._last_choice else 1
        self._last_choice = choice
        if self._run_steps > _SETTLING_STEPS:
            self._steps[choice].append((seconds, tokens))
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
            rates = self._rates(caution=0.0)
            if rates[self.best] < rates[0]:
                self.best = self._base if self.best != self._base else 0
            self._wait_for_plain()

    def _start_probe(self) -> None:
        others = [choice for choice in range(self._choices) if choice != self._base]
        self._probed = [*others, self._base] * _PROBE_ROUNDS
        self._stretch_steps_left = _STRETCH_STEPS

    def _end_stretch(self) -> None:
        choice = self._probed.pop()
        self._stretch_steps_left = _STRETCH_STEPS
        rates = self._rates(caution=0.0)
        if rates[choice] < _HOPELESS_RATIO * rates[self._base]:
            self._probed = [other for other in self._probed if other != choice]
        if not self._probed:
            self._decide()

    def _wait_for_plain(self) -> None:
        self._steps_until_plain = self._reconsider_steps
        self._reconsider_steps = min(2 * self._reconsider_steps, _LAST_RECONSIDER_STEPS)

    def _rates(self, caution: float) -> list[float]:
        """Tokens a second of each choice; 0 for one that was never tried. `caution` is the standard
        errors that are taken off the tokens: a few lucky drafts are no gain yet.
        """
        rates = []
        for steps in self._steps:
            if not steps:
                rates.append(0.0)
                continue
            seconds, tokens = np.array(steps).T
            gained = tokens.mean() - caution * tokens.std() * len(tokens) ** -0.5
            spent = np.minimum(seconds, _OUTLIER_RATIO * np.median(seconds)).mean()
            rates.append(float(gained / spent))
        return rates

    def _decide(self) -> None:
        rates = self._rates(caution=1.0)
        winner = int(np.argmax(rates))
        if rates[winner] <= _MIN_GAIN_RATIO * rates[self._base]:
            winner = 0 if self.best == 0 and rates[0] > rates[self._base] else self._base
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
