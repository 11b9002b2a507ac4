import asyncio

import pytest

from ostinato.infra.platform.errors import CapacityExhausted, SandboxError, SandboxLost
from ostinato.infra.sandbox import SandboxPool
from ostinato.infra.sandbox.fleet.records import Priority


def test_released_box_is_reused_clean(runner, wordkit):
    async def reuse():
        pool = SandboxPool(wordkit, 1)
        try:
            first = await pool.lease({"wordkit/counting.py": b"broken\n"})
            await first.exec("echo dirt > dirt", 5)
            await pool.release(first)
            async with pool.leased() as second:
                assert second is first
                return await second.diff()
        finally:
            await pool.close()

    assert runner.run(reuse()) == {}


def test_lease_waits_for_a_release(runner, wordkit):
    async def wait():
        pool = SandboxPool(wordkit, 1)
        try:
            first = await pool.lease()
            with pytest.raises(CapacityExhausted, match="none of 1 boxes"):
                await pool.lease(wait_seconds=0.05)
            waiting = asyncio.create_task(pool.lease())
            await asyncio.sleep(0)
            await pool.release(first)
            await pool.release(await waiting)
            with pytest.raises(SandboxError, match="given back"):
                await pool.release(first)
        finally:
            await pool.close()

    runner.run(wait())


def test_lost_box_is_replaced(runner, wordkit):
    async def lose():
        pool = SandboxPool(wordkit, 1)
        try:
            lost = await pool.lease()
            await lost.close()
            await pool.release(lost)
            async with pool.leased() as fresh:
                return lost is not fresh, (await fresh.exec("echo ok", 5)).output
        finally:
            await pool.close()

    assert runner.run(lose()) == (True, b"ok\n")


def test_silent_lease_is_reaped_once_and_its_box_ends(runner, wordkit):
    now = [0.0]

    async def reap():
        pool = SandboxPool(wordkit, 2, lease_seconds=100.0, clock=lambda: now[0])
        try:
            silent, alive = await pool.lease(), await pool.lease()
            now[0] = 60.0
            pool.renew(alive)
            now[0] = 120.0
            counts = [await pool.reap(), await pool.reap()]
            with pytest.raises(SandboxLost, match="this lease is over"):
                pool.renew(silent)
            await pool.release(silent)  # gives nothing back: it is ended already
            async with pool.leased() as other:
                return counts, silent.is_lost, alive.is_lost, other not in (silent, alive)
        finally:
            await pool.close()

    assert runner.run(reap()) == ([1, 0], True, False, True)


def test_box_that_comes_free_goes_to_the_highest_priority(runner, wordkit):
    async def compete():
        pool = SandboxPool(wordkit, 1)
        served = []

        async def use(priority):
            box = await pool.lease(priority=priority)
            served.append(priority)
            await pool.release(box)

        try:
            first = await pool.lease()
            uses = [asyncio.create_task(use(priority)) for priority in Priority]
            await asyncio.sleep(0)
            await pool.release(first)
            await asyncio.gather(*uses)
            return served
        finally:
            await pool.close()

    assert runner.run(compete()) == sorted(Priority, reverse=True)
