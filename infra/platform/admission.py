"""The rate at which new requests are let through. Pure: time comes in as an argument."""


class TokenBucket:
    """Tokens that grow at a steady rate up to a burst. Each admission takes one.

    In any span of t seconds at most burst + rate * t are taken.
    """

    __slots__ = ("_burst", "_level", "_per_second", "_seen_at_seconds")

    def __init__(self, per_second: float, burst: int, now_seconds: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._level = float(burst)
        self._seen_at_seconds = now_seconds

    def seconds_until_token(self, now_seconds: float) -> float:
        """0 when a token is there, else the seconds until one will be."""
        # a clock that stands still or steps back gives nothing
        passed_seconds = now_seconds - self._seen_at_seconds
        if passed_seconds > 0:
            self._level = min(self._burst, self._level + passed_seconds * self._per_second)
            self._seen_at_seconds = now_seconds
        return max(0.0, (1.0 - self._level) / self._per_second)

    def take(self, now_seconds: float) -> bool:
        """Take a token if there is one."""
        if self.seconds_until_token(now_seconds) > 0:
            return False
        self._level -= 1.0
        return True
