"""Whether to draft, and how much, from measured gain.

Owns `SpeculationGate`. Enters: what each decode-only step cost and gave. Leaves: the choice for the
next step. Choices are numbers: 0 drafts nothing, d drafts with d layers, one more than the layers
copies from the context, which is a choice only where the context has something to copy. Steps with
and without such a match are measured apart, as are batch sizes.
"""

from collections import deque

import numpy as np

_WINDOW_STEPS = 16  # measurements a depth and batch size that the gate looks back on
_PROBE_ROUNDS = 6  # times each choice is tried in a probe
_RECONSIDER_STEPS = 64  # between plain steps while drafting, which say what drafting is worth now
_FIRST_PROBE_INTERVAL_STEPS = 128
_LAST_PROBE_INTERVAL_STEPS = (
    4096  # a depth that keeps losing is tried ever less often: under 0.2 % of steps
)
_MIN_GAIN_RATIO = 1.03  # drafting must beat plain decoding by more than noise


class SpeculationGate:
    """Picks the choice with the most measured tokens a second in a situation."""

    def __init__(self, max_depth: int, max_batch: int) -> None:
        self.max_depth = max_depth
        self.max_batch = max_batch
        self.reset()

    @property
    def lookup_choice(self) -> int:
        """The number that means copying from the context."""
        return self.max_depth + 1

    def reset(self) -> None:
        """Forgets every measurement."""
        self._courses: dict[tuple[int, bool], _Course] = {}
        self.verified_at_depth = np.zeros(self.max_depth, dtype=np.int64)
        self.accepted_at_depth = np.zeros(self.max_depth, dtype=np.int64)

    def choose(self, batch: int, *, has_match: bool = False) -> int:
        """The choice for the next step."""
        if batch > self.max_batch:
            return 0
        return self._course(batch, has_match).next_choice()

    def record(
        self, batch: int, choice: int, seconds: float, tokens: int, *, has_match: bool = False
    ) -> None:
        """Adds one decode-only step."""
        if batch <= self.max_batch:
            self._course(batch, has_match).record(choice, seconds / batch, tokens / batch)

    def wants_match(self, batch: int) -> bool:
        """Whether it matters if the context has something to copy: a search costs a few percent of
        a fast step.
        """
        if batch > self.max_batch:
            return False
        with_match, without = self._course(batch, True), self._course(batch, False)
        if not (with_match.is_plain and without.is_plain):
            return True
        with_match.rest()
        return False

    def count_accepted(self, accepted_B: np.ndarray, depth: int) -> None:
        """Counts, for each draft place, how often it was looked at (all before it accepted) and how
        often it held.
        """
        for place in range(depth):
            self.verified_at_depth[place] += int((accepted_B >= place).sum())
            self.accepted_at_depth[place] += int((accepted_B > place).sum())

    def preferred_depth(self, batch: int, *, has_match: bool = False) -> int:
        """The choice that measured best so far in this situation; 0 is plain decoding."""
        return self._course(batch, has_match).best if batch <= self.max_batch else 0

    def acceptance(self) -> list[float]:
        """Share accepted a draft place, given that the places before it were."""
        return [
            float(accepted / verified) if verified else 0.0
            for accepted, verified in zip(
                self.accepted_at_depth, self.verified_at_depth, strict=True
            )
        ]

    def _course(self, batch: int, has_match: bool) -> "_Course":
        situation = ((batch - 1).bit_length(), has_match)
        if situation not in self._courses:
            self._courses[situation] = _Course(self.max_depth + 1 + has_match)
        return self._courses[situation]


class _Course:
    """Measurements and probing schedule of one situation."""

    def __init__(self, choices: int) -> None:
        self.best = 0
        self._choices = choices
        self._seconds: list[deque[float]] = [
            deque(maxlen=_WINDOW_STEPS) for _ in range(self._choices)
        ]
        self._tokens: list[deque[float]] = [
            deque(maxlen=4 * _WINDOW_STEPS) for _ in range(self._choices)
        ]
        self._probe_steps_left = _PROBE_ROUNDS * self._choices
        self._steps_until_probe = 0
        self._interval_steps = _FIRST_PROBE_INTERVAL_STEPS

    def next_choice(self) -> int:
        """Every choice in turn while probing, so that a slow moment of the machine hits all alike;
        else the best, with a plain step now and then.
        """
        if self._probe_steps_left:
            return self._probe_steps_left % self._choices
        return 0 if self._steps_until_probe % _RECONSIDER_STEPS == 0 else self.best

    def record(self, choice: int, seconds: float, tokens: float) -> None:
        self._seconds[choice].append(seconds)
        self._tokens[choice].append(tokens)
        if self._probe_steps_left:
            self._probe_steps_left -= 1
            if not self._probe_steps_left:
                self._decide()
            return
        self._steps_until_probe -= 1
        if not self._steps_until_probe:
            self._probe_steps_left = _PROBE_ROUNDS * self._choices
        elif self.best and self._steps_until_probe % _RECONSIDER_STEPS == 0:
            rates = self._rates(caution=0.0)
            self.best = self.best if rates[self.best] > rates[0] else 0

    def rest(self) -> None:
        """A step that was not looked at brings the next probe closer too."""
        self._steps_until_probe -= 1
        if not self._steps_until_probe:
            self._probe_steps_left = _PROBE_ROUNDS * self._choices

    @property
    def is_plain(self) -> bool:
        """Whether the next step drafts nothing, whatever there is to draft."""
        return not self._probe_steps_left and self.best == 0

    def _rates(self, caution: float) -> list[float]:
        """Tokens a second of each choice; 0 for one that was never tried. `caution` is the standard
        errors that are taken off the tokens: a few lucky drafts are no gain yet.
        """
        rates = []
        for tokens, seconds in zip(self._tokens, self._seconds, strict=True):
            if not seconds:
                rates.append(0.0)
                continue
            gained = np.mean(tokens) - caution * np.std(tokens) * len(tokens) ** -0.5
            rates.append(float(gained / np.median(seconds)))
        return rates

    def _decide(self) -> None:
        rates = self._rates(caution=1.0)
        winner = int(np.argmax(rates))
        winner = winner if rates[winner] > _MIN_GAIN_RATIO * rates[0] else 0
        is_settled = winner == self.best
        self._interval_steps = (
            min(2 * self._interval_steps, _LAST_PROBE_INTERVAL_STEPS)
            if is_settled
            else _FIRST_PROBE_INTERVAL_STEPS
        )
        self.best = winner
        self._steps_until_probe = self._interval_steps
