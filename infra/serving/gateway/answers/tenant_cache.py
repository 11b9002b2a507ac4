"""Values that tenants keep in a gateway's memory, bounded for each of them."""

from collections.abc import Callable
from typing import Generic, TypeVar

from cachetools import TTLCache

Value = TypeVar("Value")


class TenantCache(Generic[Value]):
    """Cache in which a tenant that fills its share loses its own least recently used values.

    When all together are too many, the tenant that holds most loses one.
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
        self._of: dict[str, TTLCache[str, Value]] = {}

    def get(self, tenant: str, key: str) -> Value | None:
        """A tenant's value, which counts as used now. Its idle time runs on: only `put` renews that."""
        held = self._of.get(tenant)
        return None if held is None else held.get(key)

    def put(self, tenant: str, key: str, value: Value) -> None:
        """Keeps a value for the idle time from now on."""
        held = self._of.setdefault(
            tenant, TTLCache(self._most_per_tenant, self._idle_seconds, self._clock)
        )
        is_new = key not in held
        held[key] = value
        if is_new and len(self) > self._most:
            self._fullest().popitem()

    def remove(self, tenant: str, key: str) -> None:
        """Forgets a value, if there is one."""
        held = self._of.get(tenant)
        if held is not None:
            held.pop(key, None)

    def count(self, tenant: str) -> int:
        """Number of a tenant's values."""
        held = self._of.get(tenant)
        return 0 if held is None else len(held)

    def __len__(self) -> int:
        """Number of all values. Tenants without any are forgotten."""
        self._of = {tenant: held for tenant, held in self._of.items() if len(held)}
        return sum(len(held) for held in self._of.values())

    def _fullest(self) -> TTLCache[str, Value]:
        return max(self._of.values(), key=len)
