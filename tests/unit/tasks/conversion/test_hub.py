"""Models of the hub: what a directory gives, once fetched; what cannot be had is said before it is."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from ostinato.flows.commands import models
from ostinato.infra.platform.artifacts import open_artifacts
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import load_settings
from ostinato.tasks.conversion.hub import is_whole
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.conversion.pinned import find_hub_model
from tests.fakes.model_hub import TOKEN, Answer, FakeHub, serving
from tests.fakes.published_model import write_published_model

FIRST, SECOND, BROKEN = "1" * 40, "2" * 40, "3" * 40
MARKER = "checkpoint.json"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    write_published_model(directory, model_type="qwen3")
    return directory


@pytest.fixture
def hub(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    first = shutil.copytree(published, tmp_path / "first")
    (first / "onnx").mkdir()
    for name in ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors"):
        (first / name).write_bytes(b"not read")
    with serving(FakeHub({FIRST: first}, {"main": FIRST, "v1": FIRST})) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            found.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "users"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found


def take(place: str, tmp_path: Path, name: str = "checkpoint") -> dict[str, Any]:
    return import_model(place, tmp_path / "work" / name, tmp_path / "cache")


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def refusal(place: str, tmp_path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        take(place, tmp_path)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert not list((tmp_path / "work").rglob("*.safetensors"))
    return str(caught.value)


def test_a_model_of_the_hub_is_the_directory_with_its_commit(
    hub: FakeHub, published: Path, tmp_path: Path
) -> None:
    facts = take("org/small", tmp_path)
    assert facts["source"] == f"org/small@{FIRST}"
    assert sorted(hub.fetched) == sorted(path.name for path in published.iterdir())
    take(str(published), tmp_path, "directory")
    fetched, read = (contents(tmp_path / "work" / name) for name in ("checkpoint", "directory"))
    markers = [json.loads(files.pop(MARKER)) for files in (fetched, read)]
    assert fetched == read
    assert [marker["metadata"].pop("source") for marker in markers] == [
        facts["source"],
        str(published),
    ]
    assert markers[0] == markers[1]


def test_a_commit_is_the_same_by_any_of_its_names_and_fetched_once(
    hub: FakeHub, tmp_path: Path
) -> None:
    take("org/small", tmp_path)
    count = len(hub.fetched)
    for name, place in {"tag": "org/small@v1", "commit": f"org/small@{FIRST}"}.items():
        take(place, tmp_path, name)
        assert contents(tmp_path / "work" / name) == contents(tmp_path / "work" / "checkpoint")
    assert len(hub.fetched) == count


def test_a_branch_that_moved_is_followed(hub: FakeHub, tmp_path: Path) -> None:
    take("org/small", tmp_path)
    write_published_model(tmp_path / "second", model_type="qwen3", rope_theta=5e5)
    hub.commits[SECOND] = tmp_path / "second"
    hub.branches["main"] = SECOND
    assert take("org/small", tmp_path)["source"] == f"org/small@{SECOND}"
    assert take("org/small@v1", tmp_path)["source"] == f"org/small@{FIRST}"


def test_a_branch_that_moves_in_between_gives_the_commit_that_was_checked(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_published_model(tmp_path / "second", model_type="qwen3", rope_theta=5e5)
    hub.commits[SECOND] = tmp_path / "second"
    answer = hub.answer

    def answer_and_move(method: str, path: str, token: str) -> Answer:
        answered = answer(method, path, token)
        hub.branches["main"] = SECOND
        return answered

    monkeypatch.setattr(hub, "answer", answer_and_move)
    assert take("org/small", tmp_path)["source"] == f"org/small@{FIRST}"
    taken = contents(tmp_path / "work" / "checkpoint")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert take("org/small", tmp_path, "later")["source"] == f"org/small@{FIRST}"
    assert contents(tmp_path / "work" / "later") == taken


def test_a_download_that_broke_off_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.broken.add("model.safetensors")
    assert "org/small@main cannot be fetched: Unavailable" in refusal("org/small", tmp_path)
    hub.broken.clear()
    take("org/small", tmp_path)
    assert len(hub.fetched) == len(set(hub.fetched)) == 5  # none twice


def test_without_a_network_what_was_fetched_is_taken(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take("org/small", tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert take("org/small", tmp_path)["source"] == f"org/small@{FIRST}"
    with pytest.raises(ConfigError, match=r"org/other@main .*127.0.0.1:9 is not reached"):
        take("org/other", tmp_path)


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_without_a_network_a_part_of_a_model_is_not_the_model(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    take("org/small", tmp_path)
    [snapshot] = (tmp_path / "cache").rglob(f"snapshots/{FIRST}")
    (snapshot / missing).unlink()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"org/small@main .* is not reached .* run again"):
        take("org/small", tmp_path)


def test_a_sharded_model_is_whole_with_all_its_shards_and_their_index(tmp_path: Path) -> None:
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    names = {"config.json", "tokenizer.model", "model.safetensors.index.json", *shards}
    for name in names:
        (tmp_path / name).touch()
    assert is_whole(tmp_path)
    for name in names:
        (tmp_path / name).unlink()
        assert not is_whole(tmp_path), name
        (tmp_path / name).touch()


def test_what_the_users_own_cache_holds_is_read_there(hub: FakeHub, tmp_path: Path) -> None:
    huggingface_hub.snapshot_download("org/small", ignore_patterns="consolidated*")
    hub.fetched.clear()
    assert take("org/small", tmp_path)["source"] == f"org/small@{FIRST}"
    assert hub.fetched == []
    # a part of a model there is not the model
    snapshot = tmp_path / "users" / "models--org--small" / "snapshots" / FIRST
    (snapshot / "tokenizer_config.json").unlink()
    take("org/small", tmp_path)
    assert "tokenizer_config.json" in hub.fetched


def test_a_gated_model_wants_a_token(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.is_gated = True
    assert f"accept its conditions at {hub.url}/org/small" in refusal("org/small", tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    take("org/small", tmp_path)


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("org/missing", "org/missing@main is no directory here and no public model of http"),
        ("org/small@v9", "org/small@v9 is no branch, tag or commit of the model"),
        ("org/small.gguf", "does not exist, wanted a model directory, a GGUF file"),
    ],
)
def test_an_unknown_name_is_refused(hub: FakeHub, tmp_path: Path, place: str, wanted: str) -> None:
    assert wanted in refusal(place, tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"model.safetensors": None}, r"pickled weights only \(pytorch_model.bin\)"),
        (
            {"model.safetensors": None, "small-q4.gguf": b""},
            "hf download org/small small-q4.gguf --local-dir . && ostinato import small-q4.gguf",
        ),
        ({"config.json": None}, "holds no config.json, wanted a complete model"),
        ({"tokenizer.json": None}, "holds no tokenizer.json or .model"),
        ({"config.json": b'{"model_type": "opt"}'}, "model family is 'opt', wanted one of llama"),
        ({"config.json": b'{"model_type": "qwen3"}'}, "org/small@1{40}: config.json"),
    ],
)
def test_what_cannot_be_imported_is_said_before_weights_are_fetched(
    hub: FakeHub, tmp_path: Path, change: dict[str, bytes | None], wanted: str
) -> None:
    for name, content in change.items():
        path = hub.commits[FIRST] / name
        path.unlink() if content is None else path.write_bytes(content)
    message = refusal("org/small", tmp_path)
    assert re.search(wanted, message), message


def test_a_model_that_does_not_fit_the_disk_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 10**17
    message = refusal("org/small", tmp_path)
    assert "takes 100000000.0 GB to fetch" in message
    assert hub.fetched == ["config.json"]


def test_a_directory_of_that_name_is_meant(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(published, tmp_path / "org" / "small")
    monkeypatch.chdir(tmp_path)
    assert find_hub_model("org/small") is None
    assert take("org/small", tmp_path)["source"] == "org/small"


def test_the_command_prints_commit_and_reference(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is typed, with the variables that the hub's library reads; then by the commit."""
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    program = "from ostinato.flows.cli import app; app()"
    answer = subprocess.run(
        [sys.executable, "-c", program, "import", "org/small"],
        env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"commit: org/small@{FIRST}" in answer.stderr, answer.stderr
    assert answer.stdout == "imported checkpoint/small@1\n"
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    ref = models.import_model(load_settings(), f"org/small@{FIRST}", None)
    assert str(ref) == "checkpoint/small@1"
    summary = open_artifacts(load_settings()).manifest(ref).metadata["summary"]
    assert summary["source"] == f"org/small@{FIRST}"
