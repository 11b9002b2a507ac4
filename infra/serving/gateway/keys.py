"""API keys of a gateway that nobody has configured yet.

The file `gateway_keys.json`: made once, readable by its owner only. A deployment with real tenants
does not use it.
"""

import json
import os
import secrets
from pathlib import Path

from pydantic import SecretStr

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.gateway.config import RateLimitConfig, TenantConfig

FILE_NAME = "gateway_keys.json"


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
