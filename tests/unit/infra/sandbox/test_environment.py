import asyncio

import pytest

from ostinato.infra.platform.errors import CapacityExhausted, InvalidArgument, SandboxNotFound
from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import SandboxLimits

COUNTING = "wordkit/counting.py"


async def use(environment, box):
    """What a box shows of an earlier lease, and what it differs in."""
    seen = await box.exec("ls /tmp /run /dev/shm; ls dirt; pgrep sleep", 30)
    return b"dirt" in seen.output.replace(b"'dirt'", b""), await box.diff()


def test_every_lease_is_a_clean_box_with_its_files(runner, wordkit):
    async def lease_twice():
        environment = RepositoryEnvironment.create(wordkit, boxes=1)
        try:
            first = await environment.lease({COUNTING: b"broken\n"})
            dirty = "for d in . /tmp /run /dev/shm; do echo x > $d/dirt; done; setsid sleep 60 &"
            await first.exec(dirty, 30)
            await environment.release(first)
            assert first.is_lost
            async with environment.leased({COUNTING: b"broken\n"}) as second:
                again = await use(environment, second)
            async with environment.leased({COUNTING: None}) as third:
                return again, await use(environment, third)
        finally:
            await environment.close()

    assert runner.run(lease_twice()) == (
        (False, {COUNTING: b"broken\n"}),
        (False, {COUNTING: None}),
    )


def test_lease_waits_for_a_release(runner, wordkit):
    async def wait():
        environment = RepositoryEnvironment.create(wordkit, boxes=1)
        try:
            first = await environment.lease()
            with pytest.raises(CapacityExhausted, match="none of 1 boxes"):
                await environment.lease(wait_seconds=0.05)
            waiting = asyncio.create_task(environment.lease())
            await asyncio.sleep(0)
            await environment.release(first)
            await environment.release(await waiting)
            with pytest.raises(SandboxNotFound, match="was released before"):
                await environment.release(first)
        finally:
            await environment.close()

    runner.run(wait())


def test_failed_start_gives_its_place_back_and_is_tried_again(runner, wordkit):
    async def fail_twice():
        environment = RepositoryEnvironment.create(wordkit, boxes=1)
        try:
            for _ in range(2):
                with pytest.raises(InvalidArgument):
                    await environment.lease({"../outside": b""}, wait_seconds=5)
            async with environment.leased() as box:
                return await box.diff()
        finally:
            await environment.close()

    assert runner.run(fail_twice()) == {}


def test_start_that_failed_for_any_reason_is_tried_again(runner, wordkit, monkeypatch):
    async def fail_once():
        environment = RepositoryEnvironment.create(wordkit, boxes=1)
        create, fails = environment._backend.create, [OSError("no room")]

        async def once(spec):
            if fails:
                raise fails.pop()
            return await create(spec)

        monkeypatch.setattr(environment._backend, "create", once)
        try:
            with pytest.raises(OSError, match="no room"):
                await environment.lease()
            async with environment.leased() as box:
                return await box.diff()
        finally:
            await environment.close()

    assert runner.run(fail_once()) == {}


def test_start_that_nobody_waits_for_is_in_no_other_lease_s_way(runner, wordkit, monkeypatch):
    monkeypatch.setattr("ostinato.infra.sandbox.environment._KEPT_STARTS", 0)

    async def leave():
        environment = RepositoryEnvironment.create(wordkit, boxes=1)
        create, may_fail = environment._backend.create, asyncio.Event()

        async def fail_late(spec):
            if COUNTING in spec.files:
                await may_fail.wait()
                raise OSError("no room")
            return await create(spec)

        monkeypatch.setattr(environment._backend, "create", fail_late)
        try:
            waiting = asyncio.create_task(environment.lease({COUNTING: b"x = 1\n"}))
            await asyncio.sleep(0.05)
            waiting.cancel()
            async with environment.leased():  # while it starts
                pass
            may_fail.set()
            async with environment.leased() as box:  # when it has failed
                return await box.diff()
        finally:
            await environment.close()

    assert runner.run(leave()) == {}


def test_many_groups_side_by_side_get_their_own_files(runner, wordkit):
    async def lease_all():
        backend = open_backend()
        environment = RepositoryEnvironment(wordkit, backend, 4, limits=SandboxLimits())

        async def attempt(group):
            async with environment.leased({COUNTING: b"%d" % group}) as box:
                return await box.read(COUNTING)

        try:
            groups = [group for group in range(12) for _ in range(2)]
            seen = await asyncio.gather(*(attempt(group) for group in groups))
            return seen == [b"%d" % group for group in groups], backend.store.directory
        finally:
            await environment.close()
            await backend.close()

    right, state = runner.run(lease_all())
    assert right
    assert not state.exists()


def test_tests_run_on_what_the_box_holds(runner, wordkit):
    async def repair():
        environment = RepositoryEnvironment.create(wordkit, boxes=1)
        tests = ("tests/test_counting.py::test_count_words",)
        try:
            text = wordkit.files[COUNTING]
            box = await environment.lease({COUNTING: text.replace(b"total += 1", b"total += 2")})
            before = await environment.test_server.run(await box.diff(), tests)
            await box.exec("sed -i 's/total += 2/total += 1/' wordkit/counting.py", 60)
            after = await environment.test_server.run(await box.diff(), tests)
            return before, after
        finally:
            await environment.close()

    before, after = runner.run(repair())
    assert before.first_failure.error_type == "AssertionError"
    assert after.passed
