"""An imported model behind the gateway's socket: OpenAI's own client with its own tools, tokens and
log-probs as transformers scores them, and an evaluation that takes it for an outside baseline.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx2
import pytest
import torch
import transformers
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.serving.gateway.config import GatewayConfig
from ostinato.infra.serving.gateway.server import running_server
from ostinato.infra.serving.gateway.serving import ServedCheckpoint, ServingPlan, open_gateway
from ostinato.infra.serving.gateway.tenants import local_tenants
from ostinato.models.decode.engine import EngineConfig
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.evaluation.attempts import TRAJECTORIES_FILE, read_rows, read_trajectories
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest, ShardRequest
from ostinato.tasks.evaluation.checkpoint.shard import run_shard
from ostinato.tasks.evaluation.config import EvaluationConfig
from ostinato.tasks.records import Split
from tests.fakes.miniature import make_problem_set
from tests.fakes.published_model import TOOL_TEMPLATE, write_published_model
from tests.fakes.toy_gateway import toy_uploads
from tests.unit.infra.serving.gateway.uploads.test_bad_archives import files_tar

KEY = "TEST_GATEWAY_KEY"
MODEL = "ostinato"
HARNESS = HarnessConfig(
    dialect="full",
    system_prompt="Repair it.",
    tools=["edit_file"],
    context_tokens=1900,
    max_generated_tokens=24,
    max_turns=2,
)
SAID: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm is it?"},
]
TOOLS: list[ChatCompletionFunctionToolParam] = [
    {
        "type": "function",
        "function": {"name": "getWeather", "parameters": {"type": "object", "properties": {}}},
    }
]


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[str, str]]:
    """Address and key of a gateway over the model that `imported` wrote."""
    tenant = local_tenants(directory, ("people",))["people"]
    async with (
        open_gateway(
            ServingPlan(ServedCheckpoint("imported@1", directory / "checkpoint", 3)),
            [],
            GatewayConfig(line="people", tenants=(tenant,), harness=HARNESS),
            ledger=Ledger(f"sqlite:///{directory}/ledger.db").migrate(),
            objects=ObjectStore.from_url(f"file://{directory}/objects"),
            engine=EngineConfig(slots=4),
            uploads=toy_uploads(directory),
        ) as gateway,
        running_server(gateway.app, "127.0.0.1", 0) as url,
    ):
        yield f"{url}/v1", tenant.api_keys[0].get_secret_value()


@pytest.fixture
def imported(tmp_path: Path) -> transformers.PreTrainedModel:
    """A tiny random llama that was imported."""
    model = write_published_model(
        tmp_path / "in", template=TOOL_TEMPLATE, max_position_embeddings=2048
    )
    import_model(str(tmp_path / "in"), tmp_path / "checkpoint", tmp_path)
    return model


@pytest.mark.asyncio
async def test_tokens_and_logprobs_are_those_of_transformers(
    imported: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    async with (
        served(tmp_path) as (url, key),
        AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        ask = partial(
            client.chat.completions.create,
            model=MODEL,
            messages=SAID,
            tools=TOOLS,
            logprobs=True,
            top_logprobs=3,
            max_tokens=20,
            seed=7,
            extra_body={"return_token_ids": True},
        )
        whole = await ask()
        stream = await ask(stream=True)
        last = [chunk async for chunk in stream][-1]
        plain = await client.chat.completions.create(model=MODEL, messages=SAID, max_tokens=2)
    choice = whole.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert whole.model_extra is not None
    assert choice.model_extra is not None
    prompt, tokens = whole.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    wanted = theirs.apply_chat_template(
        SAID, tools=TOOLS, add_generation_prompt=True, return_dict=True
    )
    assert prompt == wanted["input_ids"]
    ids_T = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits_TV = imported(input_ids=ids_T).logits[0, len(prompt) - 1 : -1].float()
    logprobs_T = logits_TV.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    seen_T = torch.tensor([token.logprob for token in choice.logprobs.content])
    torch.testing.assert_close(seen_T, logprobs_T, atol=2e-4, rtol=1e-5)
    best_T3 = torch.tensor(
        [[likely.logprob for likely in token.top_logprobs] for token in choice.logprobs.content]
    )
    wanted_T3 = logits_TV.log_softmax(-1).topk(3).values
    torch.testing.assert_close(best_T3, wanted_T3, atol=2e-4, rtol=1e-5)
    written = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert written.decode(errors="replace").removesuffix("<|im_end|>") == choice.message.content
    assert last.choices[0].logprobs is not None
    assert last.choices[0].logprobs.content == choice.logprobs.content
    assert last.model_extra is not None
    assert last.model_extra["prompt_token_ids"] == prompt
    assert plain.choices[0].logprobs is None
    assert not plain.choices[0].model_extra


@pytest.mark.asyncio
@pytest.mark.usefixtures("imported")
async def test_its_agents_work_on_a_repository_that_the_client_sent(tmp_path: Path) -> None:
    sources = {
        "pkg/__init__.py": b"",
        "tests/test_pkg.py": b"import pkg\n\n\ndef test():\n    assert pkg\n",
    }
    async with (
        served(tmp_path) as (url, key),
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=120) as client,
    ):
        sent = await client.post(f"{url}/repositories", content=files_tar(sources))
        session = {"repository": sent.json()["id"], "message": "Repair it.", "seed": 1}
        answer = await client.post(f"{url}/agent/sessions", json=session)
        unknown = await client.post(
            f"{url}/agent/sessions", json=session | {"repository": "repo-" + "0" * 32}
        )
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] in {"finished", "token_limit", "turn_limit", "broken_calls"}
    assert answer.json()["usage"]["completion_tokens"] > 0
    assert unknown.status_code == 404


@pytest.mark.usefixtures("imported")
def test_an_evaluation_takes_the_gateway_for_an_outside_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = make_problem_set(tmp_path / "problems", Split.HELD_OUT)
    (tmp_path / "shard").mkdir()

    async def evaluate(**changes: str) -> None:
        async with served(tmp_path) as (url, key):
            monkeypatch.setenv(KEY, key)
            endpoint = Endpoint(url=url, model=MODEL, key_env=KEY).model_copy(update=changes)
            evaluation = EvaluationRequest(
                checkpoint_directory=str(tmp_path),
                checkpoint_name=endpoint.title,
                endpoint=endpoint,
                problems_directory=str(problems),
                config=EvaluationConfig(problems=2, attempts_per_problem=1),
                harness=HARNESS,
            )
            shard = ShardRequest(evaluation=evaluation, index=0, count=1)
            workspace = Workspace.open(tmp_path / "shard", load_settings())
            await asyncio.to_thread(run_shard, shard, workspace)

    with pytest.raises(ConfigError, match=r"^http.* says 404: model is 'gpt', wanted 'ostinato'"):
        asyncio.run(evaluate(model="gpt"))
    assert read_rows(tmp_path / "shard" / "rows.jsonl") == []
    asyncio.run(evaluate())
    rows = read_rows(tmp_path / "shard" / "rows.jsonl")
    assert len(rows) == 2
    assert all(row.generated_tokens for row in rows)
    kept = read_trajectories(tmp_path / "shard" / TRAJECTORIES_FILE)
    assert all(row["transcript"]["turns"][0]["text"] for row in kept)
