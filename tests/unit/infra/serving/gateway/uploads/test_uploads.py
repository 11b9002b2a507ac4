"""Uploaded repositories: an agent works on one as on any other, its tenant alone has it, and it goes."""

import asyncio
import dataclasses
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from ostinato.flows.commands.garbage import find_garbage, remove
from ostinato.infra.platform.errors import CapacityExhausted
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.serving.gateway.answers.workplaces import RepositoryWorkplaces
from ostinato.infra.serving.gateway.app import build_app
from ostinato.infra.serving.gateway.server import running_server
from ostinato.infra.serving.gateway.uploads.store import Uploads
from tests.fakes.toy_gateway import BROKEN, Toy
from tests.unit.infra.serving.gateway.uploads.test_bad_archives import PATH, files_tar, zip_of

pytestmark = pytest.mark.asyncio

TEST = b"from pkg.first import first\n\n\ndef test_first():\n    assert first([1, 2]) == 1\n"
REPOSITORY = {
    "pkg/__init__.py": b"",
    "pkg/first.py": BROKEN.encode(),
    "tests/test_first.py": TEST,
    "pkg/__pycache__/first.pyc": b"\0",
}
MESSAGE = {"message": "Fix first in pkg/first.py"}
SESSIONS = "/v1/agent/sessions"
Client = Callable[[str], httpx2.AsyncClient]


@asynccontextmanager
async def served(toy: Toy) -> AsyncIterator[Client]:
    """The toy over a socket, with real boxes for what tenants send."""
    uploads = toy.context.uploads
    workplaces = RepositoryWorkplaces(
        [], boxes_per_repository=2, test_limit_seconds=60.0, uploads=uploads
    )
    app = build_app(dataclasses.replace(toy.context, workplaces=workplaces))
    try:
        async with running_server(app, "127.0.0.1", 0) as url:
            yield lambda key: httpx2.AsyncClient(
                base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120
            )
    finally:
        await uploads.close()
        await workplaces.close()


async def send(client: httpx2.AsyncClient, body: bytes) -> str:
    answer = await client.post(PATH, content=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


@pytest.mark.parametrize("pack", [files_tar, zip_of])
async def test_an_agent_repairs_what_its_client_sent(
    toy: Toy, pack: Callable[[dict[str, bytes]], bytes]
) -> None:
    async with served(toy) as client_of, client_of("key-of-team") as client:
        sent = (await client.post(PATH, content=pack(REPOSITORY))).json()
        status = (await client.get("/v1/status")).json()
        opened = (await client.post(SESSIONS, json=MESSAGE | {"repository": sent["id"]})).json()
        again = await client.post(f"{SESSIONS}/{opened['session_id']}/messages", json=MESSAGE)
        listed = (await client.get(PATH)).json()["data"]
    assert (sent["files"], sent["package_paths"], sent["test_paths"]) == (3, ["pkg"], ["tests"])
    assert sent["expires_at"] - sent["created_at"] == 3600
    assert status["repositories"] == [sent["id"]]
    assert opened["status"] == "finished"
    assert opened["changed_files"] == {"pkg/first.py": BROKEN.replace("1", "0")}
    shown = toy.context.renderer.decode(toy.model.requests[2].token_ids)
    assert "passed" in shown  # by the client's own tests, in a box
    assert again.status_code == 200
    assert [one["id"] for one in listed] == [sent["id"]]


async def test_nobody_else_has_it(toy: Toy) -> None:
    async with (
        served(toy) as client_of,
        client_of("key-of-team") as client,
        client_of("key-of-private") as other,
    ):
        name = await send(client, files_tar(REPOSITORY))
        asked = await other.post(SESSIONS, json=MESSAGE | {"repository": name})
        deleted = await other.delete(f"{PATH}/{name}")
        listed = (await other.get(PATH)).json()["data"]
        status = (await other.get("/v1/status")).json()["repositories"]
        own = await send(other, files_tar({"tests/test_other.py": TEST}))
        async with toy.context.uploads.place("private", own) as place, place.leased() as box:
            seen = await box.exec("find /repo", 20)
            theirs = toy.context.uploads.store.repository("team", name).directory
            outside = await box.exec(f"ls {theirs}", 20)
        is_left = (await client.get(PATH)).json()["data"]
    for answer in (asked, deleted):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_repository")
    assert name not in asked.json()["error"]["message"].replace(repr(name), "")
    assert listed == status == []
    assert b"test_other" in seen.output
    assert b"first.py" not in seen.output
    assert outside.exit_code
    assert len(is_left) == 1


async def test_files_are_their_owners_alone(toy: Toy, tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        async with toy.client() as client:
            await send(client, files_tar(REPOSITORY))
            await send(client, zip_of({"run.sh": b"#!"}, stat.S_IFREG | 0o777))
    finally:
        os.umask(previous)
    modes = {
        path: stat.S_IMODE(path.stat().st_mode)
        for path in [tmp_path / "uploads", *(tmp_path / "uploads").rglob("*")]
    }
    wanted = {path: 0o700 if path.is_dir() or path.name == "run.sh" else 0o600 for path in modes}
    assert modes == wanted
    assert len(modes) > 8


async def test_it_goes_when_asked_and_not_under_an_agent(toy: Toy, tmp_path: Path) -> None:
    async with served(toy) as client_of, client_of("key-of-team") as client:
        name = await send(client, files_tar(REPOSITORY))
        async with toy.context.uploads.place("team", name):
            busy = await client.delete(f"{PATH}/{name}")
        gone = await client.delete(f"{PATH}/{name}")
        again = await client.delete(f"{PATH}/{name}")
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "repository_busy")
    assert (gone.status_code, again.status_code) == (204, 404)
    assert not list((tmp_path / "uploads").glob("*/*"))


async def test_it_expires_after_its_last_use_and_frees_its_quota(toy: Toy, tmp_path: Path) -> None:
    body = files_tar({"a.py": b"x" * 120_000})
    async with served(toy) as client_of, client_of("key-of-team") as client:
        name = await send(client, body)
        full = await client.post(PATH, content=body)
        toy.now[0] += 3_000
        async with toy.context.uploads.place("team", name):  # used
            pass
        toy.now[0] += 3_000
        there = (await client.get(PATH)).json()["data"]
        toy.now[0] += 1_000
        gone = (await client.get(PATH)).json()["data"]
        asked = await client.post(SESSIONS, json=MESSAGE | {"repository": name})
        other = await send(client, body)
    assert (full.status_code, full.json()["error"]["code"]) == (403, "upload_quota_exceeded")
    assert [one["id"] for one in there] == [name]
    assert gone == []
    assert (asked.status_code, asked.json()["error"]["code"]) == (404, "unknown_repository")
    assert [path.name for path in (tmp_path / "uploads").glob("*/*")] == [other]


async def test_gc_removes_what_expired(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    toy.now[0] = load_settings().upload_hours * -3_600 + tmp_path.stat().st_mtime - 60
    store = toy.context.uploads.store
    async with toy.client() as client:
        old = await send(client, files_tar(REPOSITORY))
        young = await send(client, files_tar(REPOSITORY))
    toy.now[0] += 3_600
    store.use("team", young)
    found = find_garbage(load_settings(), 7.0)
    for item in found:
        remove(item)
    assert [item.path.name for item in found] == [old]
    assert [path.name for path in (tmp_path / "uploads").glob("*/*")] == [young]


async def test_an_answer_outlives_the_upload_that_gc_removed_meanwhile(toy: Toy) -> None:
    uploads = toy.context.uploads
    async with toy.client() as client:
        name = await send(client, files_tar({"a.py": b""}))
    async with uploads.place("team", name) as place:
        uploads.store.remove("team", name)
        answer = place.repository.files
    assert answer == {"a.py": b""}
    await uploads.close()


async def files_of(uploads: Uploads, tenant: str, name: str) -> Mapping[str, bytes]:
    async with uploads.place(tenant, name) as place:
        return place.repository.files


async def test_a_tenants_new_one_takes_the_place_of_its_own_alone(toy: Toy) -> None:
    uploads = toy.context.uploads
    for key, tenant, count in (("key-of-private", "private", 4), ("key-of-team", "team", 5)):
        async with toy.client(key) as client:
            names = [await send(client, files_tar({"a.py": b""})) for _ in range(count)]
        for name in names:
            await files_of(uploads, tenant, name)
    assert [tenant for tenant, _ in uploads._open] == ["private"] * 4 + ["team"] * 4
    await uploads.close()


async def test_few_are_open_and_one_tenant_has_half_of_them(toy: Toy) -> None:
    uploads = toy.context.uploads
    async with toy.client() as client, toy.client("key-of-private") as other:
        names = [await send(client, files_tar({"a.py": b""})) for _ in range(5)]
        theirs = await send(other, files_tar({"a.py": b""}))
    async with asyncio.TaskGroup() as group:
        inside, leave = [asyncio.Event() for _ in names[:4]], asyncio.Event()

        async def work(name: str, entered: asyncio.Event) -> None:
            async with uploads.place("team", name):
                entered.set()
                await leave.wait()

        for name, entered in zip(names, inside, strict=False):
            group.create_task(work(name, entered))
        for entered in inside:
            await entered.wait()
        with pytest.raises(CapacityExhausted, match="4 uploaded repositories are in use"):
            await files_of(uploads, "team", names[4])
        assert await files_of(uploads, "private", theirs) == {"a.py": b""}
        leave.set()
    assert await files_of(uploads, "team", names[4]) == {"a.py": b""}
    await uploads.close()


@pytest.mark.parametrize(
    ("test", "warning"),
    [
        ({}, "the repository has none"),
        ({"test_a.py": b"import nowhere_at_all\n"}, "nowhere_at_all"),
    ],
)
async def test_an_answer_about_a_repository_without_tests_says_so(
    toy: Toy, test: dict[str, bytes], warning: str
) -> None:
    async with served(toy) as as_tenant, as_tenant("key-of-team") as client:
        code = {path: text for path, text in REPOSITORY.items() if not path.startswith("tests/")}
        name = await send(client, zip_of({**code, **test}))
        answer = (await client.post(SESSIONS, json=MESSAGE | {"repository": name})).json()
        assert answer["warning"].startswith("no test can be run here: ")
        assert warning in answer["warning"]
        name = await send(client, zip_of(REPOSITORY))
        answer = (await client.post(SESSIONS, json=MESSAGE | {"repository": name})).json()
        assert answer["warning"] == ""
