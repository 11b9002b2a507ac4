"""A server written with the package mcp, in a box: the bridge speaks the protocol as its makers do."""

import asyncio
import importlib.metadata
import shutil
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.rendering import Renderer, train_tokenizer
from tests.fakes.mcp_programs import WITH_THE_PACKAGE
from tests.fakes.scripted_model import ScriptedModel

pytestmark = pytest.mark.verifiers
LIMITS = SandboxLimits(process_memory_bytes=4 << 30, memory_bytes=2 << 30)
COMMAND = "PYTHONPATH=libraries python3 server.py"


def copy_with_requirements(name: str, target: Path, seen: set[str]) -> None:
    """The files of an installed package and of what it requires."""
    if name in seen:
        return
    seen.add(name)
    found = importlib.metadata.distribution(name)
    for file in found.files or ():
        source = Path(str(found.locate_file(file)))
        if ".." not in file.parts and source.is_file() and source.suffix != ".pyc":
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / file)
    for text in found.requires or ():
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            copy_with_requirements(needed.name, target, seen)


async def attempt(directory: Path, renderer: Renderer, answers: list[str]):
    repository = PreparedRepository.from_directory("sums", directory, (), ())
    config = HarnessConfig(
        dialect="hermes",
        tools=("read_file",),
        mcp_servers={"sums": COMMAND},
        context_tokens=20_000,
        max_generated_tokens=10_000,
    )
    async with open_box(repository, {}, LIMITS) as sandbox:
        model = ScriptedModel(renderer, answers)
        request = AgentRequest(prompt="Add up.", session_id="s")
        return await run_agent(model, renderer, AgentEnvironment(sandbox), request, config)


def test_a_server_of_the_package_answers_in_a_box(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(WITH_THE_PACKAGE)
    copy_with_requirements("mcp", tmp_path / "libraries", set())
    answers = [
        '<tool_call>\n{"name": "sums__add", "arguments": {"numbers": [1, 2.5], "unit": "figs"}}\n</tool_call>',
        '<tool_call>\n{"name": "sums__divide", "arguments": {"one": 1, "other": 0}}\n</tool_call>',
        '<tool_call>\n{"name": "sums__divide", "arguments": {"one": 1, "other": 4}}\n</tool_call>',
        "Done.",
    ]
    renderer = Renderer(train_tokenizer([WITH_THE_PACKAGE], vocab_size=400))
    transcript = asyncio.run(attempt(tmp_path, renderer, answers))
    told = [turn.results[0] for turn in transcript.turns[:3]]
    statuses = [turn.calls[0].status for turn in transcript.turns[:3]]
    assert "3.5 figs" in told[0], told
    assert "division by zero" in told[1]
    assert "0.25" in told[2]
    assert statuses == [CallStatus.OK, CallStatus.ENVIRONMENT, CallStatus.OK]
