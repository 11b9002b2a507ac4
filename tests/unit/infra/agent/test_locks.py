"""The law of a turn: whatever runs at the same time, the results are those of the calls one by one,
one result each, in call order; and no result is longer than its limit."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.full.calls import call_from_json, parse_calls, write_call
from ostinato.infra.agent.dialects.full.tools import FULL_TOOLS
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.execute import execute_calls
from ostinato.infra.agent.tools.limits import cut_lines, share_out
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.platform.errors import CapacityExhausted, SandboxLost
from tests.fakes.memory_sandbox import MemorySandbox

CONFIG = HarnessConfig(dialect="full", result_limit_characters=4000)
FILES = {"a.txt": b"one\n", "b.txt": b"two\n", "d/c.txt": b"three\n"}
paths = st.sampled_from(["a.txt", "./a.txt", "d/../a.txt", "/repo/b.txt", "d/c.txt", "new.txt"])
words = st.sampled_from(["one", "two", "three", "x", "x\ny"])


def _call(name: str, **arguments: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.fixed_dictionaries(arguments).map(lambda given: write_call(name, given))


calls = st.one_of(
    _call("read_file", path=paths),
    _call("write_file", path=paths, text=words),
    _call("edit_file", path=paths, old=words, new=words),
    _call("list_dir", path=st.sampled_from(["", "d"])),
    _call("glob", pattern=st.sampled_from(["*.txt", "d/*"])),
    _call("todo_write", items=st.sampled_from(["[ ] a", "[x] a\n[ ] b"])),
    st.sampled_from(["<call>", '<call tool="rm"></call>', '<call tool="grep"></call>']),
)


class SlowSandbox(MemorySandbox):
    """Every operation takes a random number of turns of the event loop."""

    def __init__(self, seed: int | None) -> None:
        super().__init__(FILES)
        self._random = random.Random(seed) if seed is not None else None

    async def _wait(self) -> None:
        if self._random is not None:
            for _ in range(self._random.randrange(6)):
                await asyncio.sleep(0)

    async def read(self, path: str) -> bytes:
        await self._wait()
        content = await super().read(path)
        await self._wait()
        return content

    async def write(self, path: str, content: bytes) -> None:
        await self._wait()
        await super().write(path, content)
        await self._wait()

    async def list(self, path: str = ".") -> tuple[str, ...]:
        await self._wait()
        return await super().list(path)


@settings(deadline=None, max_examples=150)
@given(st.lists(calls, max_size=6), st.integers(0, 1000))
def test_results_are_those_of_the_calls_one_by_one(texts: list[str], seed: int) -> None:
    parsed = parse_calls("\n".join(texts), FULL_TOOLS).calls
    together, alone = SlowSandbox(seed), SlowSandbox(None)
    environment = AgentEnvironment(together)
    results = asyncio.run(execute_calls(parsed, environment, CONFIG))

    async def one_by_one() -> list[str]:
        serial = AgentEnvironment(alone)
        found = []
        for index, call in enumerate(parsed, start=1):
            (result,) = await execute_calls([call], serial, CONFIG)
            found.append(result.text.replace("[1.1 ", f"[1.{index} ", 1))
        return found

    assert [result.text for result in results] == asyncio.run(one_by_one())
    assert together.files == alone.files
    assert [result.record.tool for result in results] == [call.tool for call in parsed]
    assert len({result.record.call_id for result in results}) == len(parsed)


def test_a_call_id_given_twice_still_gets_two_results() -> None:
    twice = [call_from_json("glob", '{"pattern": "*"}', FULL_TOOLS, "x")] * 2
    results = asyncio.run(execute_calls(twice, AgentEnvironment(SlowSandbox(None)), CONFIG))
    statuses = [result.record.status for result in results]
    assert statuses == [CallStatus.OK, CallStatus.INVALID_ARGUMENTS]


class FailingSandbox(SlowSandbox):
    """Fails a number of reads before it works."""

    def __init__(self, failures: int, error: Exception) -> None:
        super().__init__(None)
        self.failures, self.error, self.reads = failures, error, 0

    async def read(self, path: str) -> bytes:
        self.reads += 1
        if self.reads <= self.failures:
            raise self.error
        return await super().read(path)


def run_reading(sandbox: MemorySandbox) -> list[str]:
    text = write_call("read_file", {"path": "a.txt"}) + write_call("glob", {"pattern": "*"})
    parsed = parse_calls(text, FULL_TOOLS).calls
    results = asyncio.run(execute_calls(parsed, AgentEnvironment(sandbox), CONFIG))
    return [result.text for result in results]


def test_faults_of_ours_are_tried_again_and_then_end_the_attempt() -> None:
    busy = CapacityExhausted("no room")
    assert "1\tone" in run_reading(FailingSandbox(2, busy))[0]
    with pytest.raises(CapacityExhausted):
        run_reading(FailingSandbox(3, busy))
    lost = FailingSandbox(1, SandboxLost("gone"))
    with pytest.raises(SandboxLost):
        run_reading(lost)
    assert lost.reads == 1


def test_a_tool_that_crashes_is_our_fault_not_the_models() -> None:
    with pytest.raises(Exception, match="tool read_file: ZeroDivisionError"):
        run_reading(FailingSandbox(9, ZeroDivisionError("bug")))


@settings(deadline=None)
@given(st.text(alphabet="ab\n", max_size=400), st.integers(80, 200))
def test_a_cut_text_keeps_its_ends_within_the_limit(text: str, limit: int) -> None:
    cut = cut_lines(text, limit)
    assert len(cut) <= limit
    assert cut == text if len(text) <= limit else "cut" in cut
    assert cut[:10] == text[:10]
    assert cut[-10:] == text[-10:]


@settings(deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(0, 500), min_size=1, max_size=9))
def test_shares_use_the_total_and_favour_the_short(total: int, wanted: list[int]) -> None:
    shares = share_out(total, wanted)
    assert all(share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) <= total
    assert shares == wanted or sum(shares) == total
    assert all(
        share == want or share >= min(want, total // len(wanted))
        for share, want in zip(shares, wanted, strict=True)
    )


def test_all_results_of_a_turn_share_a_limit() -> None:
    config = CONFIG.model_copy(update={"turn_limit_characters": 2000})
    sandbox = MemorySandbox(dict.fromkeys(("a", "b", "c"), b"word\n" * 2000))
    text = "".join(write_call("read_file", {"path": name}) for name in ("a", "b", "c"))
    parsed = parse_calls(text, FULL_TOOLS).calls
    results = asyncio.run(execute_calls(parsed, AgentEnvironment(sandbox), config))
    assert sum(len(result.text.partition("\n")[2]) for result in results) <= 2000
    assert all("cut" in result.text for result in results)
