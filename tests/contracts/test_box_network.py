"""Boxes with a package index: pip works unchanged, many attempts fetch a file once, and no credential enters a box."""

import asyncio
from collections.abc import Iterator

import pytest

from ostinato.infra.sandbox.egress.config import EgressConfig
from tests.fakes.local_index import (
    NAME,
    PASSWORD,
    WHEEL,
    LocalIndex,
    credentials_sent,
    served_index,
)
from tests.fakes.open_boxes import open_environment

WITH_INDEX = EgressConfig(allow=("index",))
FETCH = f"""
import os, re, urllib.request
index = os.environ["PIP_INDEX_URL"]
page = urllib.request.urlopen(f"{{index}}/{NAME}/").read().decode()
url = index.removesuffix("/simple") + re.search('href="([^"#]+)', page)[1]
print(len(urllib.request.urlopen(url).read()))
"""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    with served_index(monkeypatch) as index:
        yield index


@pytest.mark.asyncio
async def test_pip_installs_a_package_and_sees_no_credentials(index: LocalIndex) -> None:
    async with open_environment(WITH_INDEX) as open_box, open_box() as box:
        seen = await box.shell(f"pip install -vvv {NAME} 2>&1; env; cat /proc/*/environ")
        assert f"Successfully installed {NAME}" in seen
        assert PASSWORD not in seen
        assert index.host not in seen
        said = await box.shell("python3 -c 'import tiny_words; print(tiny_words.SAID)'; tiny-words")
        assert said == "hello\nhello\n"
    assert credentials_sent(index) == {f"reader:{PASSWORD}"}
    assert box.requests[0].path == f"/simple/{NAME}/"
    assert {(each.method, each.host, each.allowed, each.reason) for each in box.requests} == {
        ("GET", "index", True, "")
    }
    assert all(each.received_bytes > 0 for each in box.requests)


@pytest.mark.asyncio
async def test_attempts_at_a_time_fetch_a_file_once(index: LocalIndex) -> None:
    async with open_environment(WITH_INDEX) as open_box:

        async def fetch() -> int:
            async with open_box() as box:
                return int(await box.python(FETCH))

        sizes = await asyncio.gather(*(fetch() for _ in range(6)))
    assert set(sizes) == {len(index.answers[f"/files/{WHEEL}"][2])}
    assert index.paths.count(f"/files/{WHEEL}") == 1
    assert index.paths.count(f"/simple/{NAME}/") == 1


@pytest.mark.asyncio
async def test_own_package_of_a_problem_is_refused_also_by_a_link_that_another_attempt_saw(
    index: LocalIndex,
) -> None:
    async with open_environment(WITH_INDEX) as open_box:
        async with open_box() as other:
            await other.python(FETCH)
            path = other.requests[1].path
        async with open_box({"Tiny.Words"}) as box:
            assert "403" in await box.python(FETCH)
            assert "made from" in await box.shell(f"curl -s ${{PIP_INDEX_URL%/simple}}{path}")
            moved = path.replace(NAME, "other", 1)
            assert "no page" in await box.shell(f"curl -s ${{PIP_INDEX_URL%/simple}}{moved}")
    assert len(box.requests) == 3
    assert not any(each.allowed for each in box.requests)
