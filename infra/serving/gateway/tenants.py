"""Authentication and admission of callers: API keys, request rates and token budgets.

A machine without configured tenants has its own keys in `gateway_keys.json`: created once, readable
only by their owner.
"""

import json
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pydantic import SecretStr

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.gateway.budgets import DAY_SECONDS, Budgets
from ostinato.infra.serving.gateway.config import (
    LOCAL_KEYS_FILE,
    Caller,
    RateLimitConfig,
    TenantConfig,
)
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys, digest_of, locked, write_private


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
        """0 when a token is available, else the seconds until one will be."""
        # a clock that stops or steps back adds no tokens
        passed_seconds = now_seconds - self._seen_at_seconds
        if passed_seconds > 0:
            self._level = min(self._burst, self._level + passed_seconds * self._per_second)
            self._seen_at_seconds = now_seconds
        return max(0.0, (1.0 - self._level) / self._per_second)

    def take(self, now_seconds: float) -> bool:
        """Takes a token. False when none is available."""
        if self.seconds_until_token(now_seconds) > 0:
            return False
        self._level -= 1.0
        return True


_WAIT_SECONDS = 5.0  # after which running answers may have given back reserved tokens


class Tenants:
    """All tenants of a gateway: those of its settings, and those with issued keys."""

    def __init__(
        self,
        configs: tuple[TenantConfig, ...],
        issued: IssuedKeys | None = None,
        budgets: Budgets | None = None,
    ) -> None:
        self._issued, self.budgets = issued, budgets or Budgets()
        self._by_digest: dict[str, TenantConfig] = {}
        self._buckets: dict[str, tuple[RateLimitConfig, TokenBucket]] = {}
        self._reserved: Counter[str] = Counter()  # tokens of running answers by account
        names = [config.name for config in configs]
        for config in configs:
            if names.count(config.name) > 1:
                raise ConfigError(f"tenant {config.name!r} is named twice, wanted unique names")
            for key in config.api_keys:
                digest = digest_of(key.get_secret_value())
                if digest in self._by_digest:
                    raise ConfigError(
                        f"an API key of tenant {config.name!r} is used twice, wanted unique keys"
                    )
                self._by_digest[digest] = config

    def identify(self, api_key: str) -> Caller | None:
        """Caller of a key, or None. Looked up by digest, so timing does not leak keys."""
        known = self._by_digest.get(digest_of(api_key))
        if known is None and self._issued is not None:
            return self._issued.identify(api_key)
        return known

    def admit(self, caller: Caller, now: float) -> float:
        """Counts one request against the caller: 0 when admitted, else seconds to wait."""
        limit, bucket = self._buckets.get(caller.account, (None, None))
        if bucket is None or limit != caller.rate_limit:
            limit = caller.rate_limit
            bucket = TokenBucket(limit.requests_per_minute / 60, limit.burst_requests, now)
            self._buckets[caller.account] = (limit, bucket)
        return 0.0 if bucket.take(now) else bucket.seconds_until_token(now)

    def tokens_left(self, caller: Caller, wall_seconds: float) -> int | None:
        """Tokens that the caller may still use today (UTC). None: no limit."""
        if caller.tokens_per_day is None:
            return None
        return max(0, caller.tokens_per_day - self.budgets.spent(caller.account, wall_seconds))

    def reserve(self, account: str, tokens: int) -> None:
        """Counts tokens that a running answer may use. A negative number gives them back."""
        self._reserved[account] += tokens
        if not self._reserved[account]:
            del self._reserved[account]

    def reserved(self, account: str) -> int:
        """Tokens that the account's running answers may use."""
        return self._reserved[account]


class Spending:
    """One request's share of its caller's budget. Its tokens are reserved before an answer is sampled, and given back
    when the request ends, by which time the used ones are counted.
    """

    def __init__(
        self,
        tenants: Tenants,
        caller: Caller,
        wall_clock: Callable[[], float],
        counters: Counter[str],
    ) -> None:
        self.caller = caller
        self._tenants, self._wall_clock, self._counters = tenants, wall_clock, counters
        self._reserved_tokens = 0

    def reserve(self, tokens: int) -> None:
        """Reserves tokens. ApiError when none are left for this request: either all are used, or running answers
        may use the rest. The last admitted answer may exceed the budget, since answers are not cut off.
        """
        now, account = self._wall_clock(), self.caller.account
        left = self._tenants.tokens_left(self.caller, now)
        if left == 0:
            self._counters["over_budget"] += 1
            raise ApiError(
                429,
                f"{account} has used its {self.caller.tokens_per_day} tokens for today (UTC)",
                code="insufficient_quota",
                retry_after_seconds=DAY_SECONDS - now % DAY_SECONDS,
            )
        reserved = self._tenants.reserved(account)
        if left is not None and reserved >= left:
            self._counters["tokens_reserved"] += 1
            raise ApiError(
                429,
                f"{account} has {left} of {self.caller.tokens_per_day} tokens left for today (UTC) and "
                f"answers at work may use {reserved}; wait for them, or set a lower max_tokens",
                code="tokens_reserved",
                retry_after_seconds=_WAIT_SECONDS,
            )
        self._tenants.reserve(account, tokens)
        self._reserved_tokens += tokens

    def end(self) -> None:
        """Gives back what is reserved."""
        self._tenants.reserve(self.caller.account, -self._reserved_tokens)
        self._reserved_tokens = 0


def local_tenants(directory: Path, names: tuple[str, ...]) -> dict[str, TenantConfig]:
    """Consenting tenants of this machine by name. Their keys persist across restarts."""
    path = directory / LOCAL_KEYS_FILE
    keys = _read(path)
    if not keys.keys() >= set(names):
        with locked(path):  # when several processes start at once, one creates the keys
            keys = {name: f"ostinato-{secrets.token_urlsafe(24)}" for name in names} | _read(path)
            write_private(path, json.dumps(keys, indent=1).encode())
    limit = RateLimitConfig(requests_per_minute=60_000, burst_requests=1_000)
    return {
        name: TenantConfig(
            name=name,
            api_keys=(SecretStr(keys[name]),),
            consent=True,
            rate_limit=limit,
            operator=True,
        )
        for name in names
    }


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        keys = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}), wanted tenant names with their keys; delete it for "
            "new keys"
        ) from error
    if not isinstance(keys, dict) or not all(isinstance(key, str) and key for key in keys.values()):
        raise ConfigError(f"{path} does not hold an object of keys; delete it for new keys")
    return keys
