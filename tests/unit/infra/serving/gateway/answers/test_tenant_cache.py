"""A full cache is made room in by whoever fills it."""

from ostinato.infra.serving.gateway.answers.tenant_cache import TenantCache


def filled(now: list[float]) -> TenantCache[int]:
    cache: TenantCache[int] = TenantCache(3, 5, 10.0, lambda: now[0])
    for number in range(3):
        cache.put("crowd", f"c{number}", number)
    cache.put("few", "f0", 0)
    return cache


def test_full_tenant_loses_its_own_least_recently_used() -> None:
    cache = filled([0.0])
    assert cache.get("crowd", "c0") == 0
    cache.put("crowd", "c3", 3)
    assert cache.get("crowd", "c1") is None
    assert [cache.get("crowd", key) for key in ("c0", "c2", "c3")] == [0, 2, 3]
    assert cache.get("few", "f0") == 0


def test_full_cache_takes_from_the_tenant_that_holds_most() -> None:
    cache = filled([0.0])
    cache.put("few", "f1", 1)
    cache.put("new", "n0", 0)
    assert cache.get("crowd", "c0") is None
    assert (cache.count("crowd"), cache.count("few"), cache.count("new")) == (2, 2, 1)
    assert len(cache) == 5
    cache.put("new", "n0", 1)  # the same key takes no more room
    assert (len(cache), cache.get("new", "n0")) == (5, 1)


def test_idle_and_removed_values_are_gone() -> None:
    now = [0.0]
    cache = filled(now)
    cache.remove("crowd", "c2")
    assert cache.get("crowd", "c2") is None
    now[0] = 9.0
    cache.put("few", "f0", 0)
    now[0] = 11.0
    assert (len(cache), cache.count("crowd"), cache.get("few", "f0")) == (1, 0, 0)


def test_tenants_do_not_see_each_other() -> None:
    cache = filled([0.0])
    assert cache.get("few", "c0") is None
    assert cache.get("nobody", "c0") is None
