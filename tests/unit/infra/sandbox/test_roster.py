"""The list of a backend's sandboxes, with sandboxes that do nothing."""

import asyncio
from dataclasses import dataclass, field

import pytest

from ostinato.infra.platform.errors import CapacityExhausted, InvalidArgument, SandboxNotFound
from ostinato.infra.sandbox.host.roster import Lifetime, Roster, check_count, start_all
from ostinato.infra.sandbox.protocol import SandboxSpec


@dataclass(eq=False)
class Box:
    sandbox_id: str
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    is_lost: bool = False
    is_expired: bool = False
    is_closed: bool = False

    async def close(self) -> None:
        self.is_closed = True


async def start(name: str) -> Box:
    await asyncio.sleep(0)
    return Box(name)


async def fail() -> Box:
    raise CapacityExhausted("no room")


async def test_a_key_has_one_live_sandbox_whoever_asks() -> None:
    roster: Roster[Box] = Roster()
    names = iter("abcdef")
    make = lambda: start(next(names))  # noqa: E731
    first, same = await asyncio.gather(*(roster.create_once("key", make) for _ in range(2)))
    assert first is same
    assert await roster.create_once("", make) is not await roster.create_once("", make)
    first.is_lost = True
    assert await roster.create_once("key", make) is not first


async def test_a_start_that_failed_is_tried_again() -> None:
    roster: Roster[Box] = Roster()
    with pytest.raises(CapacityExhausted):
        await roster.create_once("key", fail)
    assert (await roster.create_once("key", lambda: start("b"))).sandbox_id == "b"


async def test_who_gives_up_waiting_does_not_end_the_start_of_another() -> None:
    roster: Roster[Box] = Roster()
    gate = asyncio.Event()

    async def slow() -> Box:
        await gate.wait()
        return Box("slow")

    impatient = asyncio.create_task(roster.create_once("key", slow))
    patient = asyncio.create_task(roster.create_once("key", slow))
    await asyncio.sleep(0)
    impatient.cancel()
    gate.set()
    assert (await patient).sandbox_id == "slow"
    assert impatient.cancelled()


async def test_reaping_closes_the_expired_and_the_lost_and_nothing_else() -> None:
    roster: Roster[Box] = Roster()
    boxes = [Box("a", is_expired=True), Box("b"), Box("c", is_lost=True)]
    for box in boxes:
        roster.add(box)
    assert await roster.reap() == ("a", "c")
    assert [box.is_closed for box in boxes] == [True, False, True]


def test_only_the_same_sandbox_is_found_and_only_once_removed() -> None:
    roster: Roster[Box] = Roster()
    box = Box("a", SandboxSpec(labels={"run": "1", "use": "x"}))
    roster.add(box)
    assert roster.with_labels({"run": "1"}) == roster.with_labels(None) == (box,)
    assert roster.with_labels({"run": "1", "use": "y"}) == ()
    with pytest.raises(SandboxNotFound):
        roster.find(Box("a"))  # type: ignore[arg-type]
    assert roster.remove(box)
    assert not roster.remove(box)
    assert len(roster) == 0


async def test_all_start_or_none_is_left() -> None:
    made: list[Box] = []

    async def noted(name: str) -> Box:
        made.append(await start(name))
        return made[-1]

    assert [box.sandbox_id for box in await start_all(map(start, "ab"))] == ["a", "b"]
    with pytest.raises(CapacityExhausted):
        await start_all([noted("a"), fail(), noted("b")])
    assert [box.is_closed for box in made] == [True, True]
    with pytest.raises(InvalidArgument):
        check_count(0)


def test_a_lifetime_counts_from_its_last_renewal() -> None:
    now = [10.0]
    lifetime = Lifetime(lambda: now[0], 5.0)
    now[0] = 14.0
    assert (lifetime.is_over, lifetime.left_seconds) == (False, 1.0)
    lifetime.renew()
    now[0] = 18.9
    assert not lifetime.is_over
    lifetime.renew(1.0)
    now[0] = 20.0
    assert lifetime.is_over
