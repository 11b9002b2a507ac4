"""Bounds how fast boxes start on a node: start-up peaks exceed steady use.

`TokenBucket`, which in any span of t seconds lets at most burst + rate * t starts through.
"""


class TokenBucket:
    """Tokens grow at a steady rate up to the burst; a start takes one."""

    __slots__ = ("_burst", "_level", "_per_second", "_seen_at_seconds")

    def __init__(self, per_second: float, burst: int, now_seconds: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._level = float(burst)
        self._seen_at_seconds = now_seconds

    def has_token(self, now_seconds: float) -> bool:
        """Whether a start may happen now."""
        self._refill(now_seconds)
        return self._level >= 1.0

    def take(self, now_seconds: float) -> bool:
        """Take a token if there is one."""
        if not self.has_token(now_seconds):
            return False
        self._level -= 1.0
        return True

    def _refill(self, now_seconds: float) -> None:
        # a clock that stands still or steps back gives nothing
        passed_seconds = now_seconds - self._seen_at_seconds
        if passed_seconds > 0:
            self._level = min(self._burst, self._level + passed_seconds * self._per_second)
            self._seen_at_seconds = now_seconds
