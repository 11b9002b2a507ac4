import asyncio

import pytest

from infra.errors import CapacityExhausted, SandboxError
from infra.sandbox import SandboxPool


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
