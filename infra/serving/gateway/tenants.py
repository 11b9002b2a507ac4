"""Who is calling, and whether they may call now.

`Tenants`: API key to tenant (keys are kept as digests) and one token bucket a tenant. It knows no
HTTP.
"""

import hashlib

from ostinato.infra.platform.admission import TokenBucket
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.gateway.config import TenantConfig


class Tenants:
    """All tenants of a gateway."""

    def __init__(self, configs: tuple[TenantConfig, ...]) -> None:
        self._by_digest: dict[str, TenantConfig] = {}
        self._buckets: dict[str, TokenBucket] = {}
        for config in configs:
            if config.name in self._buckets:
                raise ConfigError(f"tenant {config.name!r} is named twice, wanted unique names")
            limit = config.rate_limit
            self._buckets[config.name] = TokenBucket(
                limit.requests_per_minute / 60, limit.burst_requests, 0.0
            )
            for key in config.api_keys:
                digest = _digest(key.get_secret_value())
                if digest in self._by_digest:
                    raise ConfigError(
                        f"an API key of tenant {config.name!r} is used twice, wanted unique keys"
                    )
                self._by_digest[digest] = config

    def identify(self, api_key: str) -> TenantConfig | None:
        """Tenant of a key, or None. Looked up by digest, so timing tells nothing."""
        return self._by_digest.get(_digest(api_key))

    def admit(self, tenant: TenantConfig, now: float) -> float:
        """Counts one request against the tenant: 0 when admitted, else seconds to wait."""
        bucket = self._buckets[tenant.name]
        return 0.0 if bucket.take(now) else bucket.seconds_until_token(now)


def _digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest()
