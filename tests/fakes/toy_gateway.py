"""A whole gateway over a real ledger and object store; only the model and the sandbox are
stand-ins.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI
from pydantic import SecretStr

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.sandbox.protocol import Sandbox, TestFailure, TestOutcome, TestReport
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.serving.gateway.answers.workplaces import Files
from ostinato.infra.serving.gateway.app import build_app
from ostinato.infra.serving.gateway.arms import Arm, ArmTable
from ostinato.infra.serving.gateway.config import GatewayConfig, RateLimitConfig, TenantConfig
from ostinato.infra.serving.gateway.context import GatewayContext
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys
from ostinato.infra.serving.gateway.uploads.store import Uploads, UploadStore
from ostinato.models.rendering import Renderer, train_tokenizer
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.memory_sandbox import MemorySandbox

PRISTINE = {
    "pkg/first.py": b"def first(items):\n    return items[0]\n",
    "pkg/logo.png": b"\x89\xff",
}
LINE = "toy"
BROKEN = "def first(items):\n    return items[1]\n"
REQUEST = {
    "repository": "toy",
    "message": "Fix first in pkg/first.py",
    "files": {"pkg/first.py": BROKEN},
}
REPAIR = (
    "<read_file>pkg/first.py::first</read_file>",
    "<edit_file><L2>    return items[0]</edit_file><run_terminal>pytest</run_terminal>",
    "Fixed.",
)


class MemoryWorkplaces:
    """Repositories that are dictionaries; their tests pass when first.py is whole."""

    def __init__(self) -> None:
        self.leases: list[tuple[str, ...] | None] = []
        self.failure: Exception | None = None  # raised by every lease

    def names(self, tenant: str) -> tuple[str, ...]:
        return ("toy",)

    async def pristine(self, tenant: str, repository: str) -> Mapping[str, bytes]:
        return PRISTINE

    @asynccontextmanager
    async def lease(
        self, tenant: str, repository: str, files: Files, test_ids: tuple[str, ...] | None
    ) -> AsyncIterator[AgentEnvironment]:
        self.leases.append(test_ids)
        if self.failure is not None:
            raise self.failure
        sandbox = MemorySandbox(PRISTINE)
        await sandbox.write_files(files)
        yield AgentEnvironment(sandbox=sandbox, run_tests=run_tests)


async def run_tests(sandbox: Sandbox) -> TestReport:
    whole = await sandbox.read("pkg/first.py") == PRISTINE["pkg/first.py"]
    failure = TestFailure(test_id="t", error_type="AssertionError", message="", frames=())
    return TestReport(
        outcomes={"t": TestOutcome.PASSED if whole else TestOutcome.FAILED},
        first_failure=None if whole else failure,
        route="hot",
        seconds=0.0,
    )


def repairing(conversation: str) -> str:
    """Reads, edits and runs the tests, says so, whatever was asked."""
    request = conversation[conversation.rfind("<|user|>") :]
    return REPAIR[min(request.count("<|assistant|>"), 2)]


@dataclass
class Toy:
    """A gateway and what it writes to."""

    app: FastAPI
    context: GatewayContext
    model: AnsweringModel
    workplaces: MemoryWorkplaces
    ledger: Ledger
    objects: ObjectStore
    now: list[float]

    def client(self, key: str = "key-of-team") -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"}
        transport = httpx2.ASGITransport(app=self.app)
        return httpx2.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)


def make_renderer() -> Renderer:
    """A tokenizer trained on what the toy says."""
    texts = [
        BROKEN,
        *REPAIR,
        "Fix first in pkg/first.py. It still fails. passed failed: AssertionError",
    ] * 3
    return Renderer(train_tokenizer(texts, 420))


def make_toy_gateway(
    directory: Path,
    renderer: Renderer,
    answer: Callable[[str], str] = repairing,
    **changes: Any,
) -> Toy:
    """A gateway that keeps its ledger and objects in `directory`; `changes` are fields of
    GatewayConfig.
    """
    ledger = Ledger(f"sqlite:///{directory}/ledger.db").migrate()
    objects = ObjectStore.from_url(f"file://{directory}/objects")
    model = AnsweringModel(renderer, answer, weight_version=4)
    workplaces = MemoryWorkplaces()
    now = [1_000.0]
    slow = RateLimitConfig(requests_per_minute=60, burst_requests=2)
    fast = RateLimitConfig(requests_per_minute=60, burst_requests=10_000)
    tenants = (
        TenantConfig(
            name="team", api_keys=(SecretStr("key-of-team"),), consent=True, rate_limit=fast
        ),
        TenantConfig(name="private", api_keys=(SecretStr("key-of-private"),), rate_limit=fast),
        TenantConfig(name="slow", api_keys=(SecretStr("key-of-slow"),), rate_limit=slow),
    )
    settings: dict[str, Any] = {
        "line": LINE,
        "tenants": tenants,
        "harness": HarnessConfig(context_tokens=700),
    } | changes
    context = GatewayContext(
        config=GatewayConfig(**settings),
        arms=ArmTable(Arm("control", "nano@1", 4, model)),
        renderer=renderer,
        workplaces=workplaces,
        ledger=ledger,
        objects=objects,
        uploads=Uploads(toy_uploads(directory, lambda: now[0])),
        issued_keys=IssuedKeys(directory),
        wall_clock=lambda: now[0],
        clock=lambda: now[0],
    )
    return Toy(build_app(context), context, model, workplaces, ledger, objects, now)


def toy_uploads(directory: Path, wall_clock: Callable[[], float] = time.time) -> UploadStore:
    """Uploads that are kept for an hour, 200 KiB of each tenant."""
    return UploadStore(
        directory / "uploads", hours=1.0, bytes_per_tenant=200 << 10, wall_clock=wall_clock
    )


def toy_repository(directory: Path) -> PreparedRepository:
    """The toy's sources on disk with a real test."""
    files = directory / "files"
    test = "from pkg.first import first\n\n\ndef test_first():\n    assert first([1, 2]) == 1\n"
    sources = {"pkg/__init__.py": "", "pkg/first.py": PRISTINE["pkg/first.py"].decode()}
    for path, text in (sources | {"tests/test_first.py": test}).items():
        (files / path).parent.mkdir(parents=True, exist_ok=True)
        (files / path).write_text(text)
    return PreparedRepository.from_directory("toy", files, ("pkg",), ("tests",))
