"""Who is calling, and whether they may call now: API keys, and one token bucket per tenant.

A machine without configured tenants has its own in `gateway_keys.json`: made once, readable by its
owner only.
"""

import hashlib
import json
import os
import secrets
from pathlib import Path

from pydantic import SecretStr

from ostinato.infra.platform.admission import TokenBucket
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.gateway.config import RateLimitConfig, TenantConfig

FILE_NAME = "gateway_keys.json"


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


def local_tenants(directory: Path, names: tuple[str, ...]) -> dict[str, TenantConfig]:
    """Consenting tenants of this machine by name. Their keys stay from start to start."""
    path = directory / FILE_NAME
    keys: dict[str, str] = _read(path)
    missing = [name for name in names if name not in keys]
    if missing:
        keys |= {name: f"ostinato-{secrets.token_urlsafe(24)}" for name in missing}
        _write(path, keys)
    limit = RateLimitConfig(requests_per_minute=60_000, burst_requests=1_000)
    return {
        name: TenantConfig(
            name=name, api_keys=(SecretStr(keys[name]),), consent=True, rate_limit=limit
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


def _write(path: Path, keys: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.touch(mode=0o600)
    partial.write_text(json.dumps(keys, indent=1))
    partial.replace(path)
