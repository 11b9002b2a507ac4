"""Values of tenants in a gateway's memory, bounded per tenant."""

from collections.abc import Callable
from typing import Generic, TypeVar

from cachetools import TTLCache

Value = TypeVar("Value")


class TenantCache(Generic[Value]):
    """Cache in which a tenant above its own limit loses its least recently used values.

    When the tenants exceed the common limit, the tenant with the most values loses one.
    """

    def __init__(
        self,
        most_per_tenant: int,
        most: int,
        idle_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._most_per_tenant, self._most = most_per_tenant, most
        self._idle_seconds, self._clock = idle_seconds, clock
        self._by_tenant: dict[str, TTLCache[str, Value]] = {}

    def get(self, tenant: str, key: str) -> Value | None:
        """A tenant's value, now its most recently used. Its idle time runs on: only `put` restarts it."""
        held = self._by_tenant.get(tenant)
        return None if held is None else held.get(key)

    def put(self, tenant: str, key: str, value: Value) -> None:
        """Keeps a value for the idle time from now on."""
        held = self._by_tenant.setdefault(
            tenant, TTLCache(self._most_per_tenant, self._idle_seconds, self._clock)
        )
        is_new = key not in held
        held[key] = value
        if is_new and len(self) > self._most:
            max(self._by_tenant.values(), key=len).popitem()

    def remove(self, tenant: str, key: str) -> None:
        """Removes a value, if there is one."""
        held = self._by_tenant.get(tenant)
        if held is not None:
            held.pop(key, None)

    def count(self, tenant: str) -> int:
        """Number of a tenant's values."""
        held = self._by_tenant.get(tenant)
        return 0 if held is None else len(held)

    def __len__(self) -> int:
        """Number of all values. Also drops tenants without any."""
        self._by_tenant = {tenant: held for tenant, held in self._by_tenant.items() if len(held)}
        return sum(len(held) for held in self._by_tenant.values())
