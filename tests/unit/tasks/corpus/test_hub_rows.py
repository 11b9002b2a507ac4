"""A data set of the hub becomes one file of rows, fetched once, and readable later without a network."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from ostinato.flows.sft import data_file
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from tests.fakes.model_hub import FakeHub, serving

FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for commit in (FIRST, SECOND):
        (tmp_path / commit / "data").mkdir(parents=True)
    rows = [{"id": "a"}, {"id": "b"}]
    (tmp_path / FIRST / "data/train-0.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(
        pyarrow.Table.from_pylist([{"id": "c"}]), tmp_path / FIRST / "data/train-1.parquet"
    )
    (tmp_path / FIRST / "data/test.jsonl").write_text('{"id": "held out"}')
    (tmp_path / FIRST / "README.md").write_text("not read")
    (tmp_path / SECOND / "README.md").write_text("not read")
    commits = {FIRST: tmp_path / FIRST, SECOND: tmp_path / SECOND}
    with serving(FakeHub(commits, {"main": FIRST, "v2": SECOND})) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            found.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", cache_directory=tmp_path / "cache")


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_training_files_are_one_file_of_rows_fetched_once(hub: FakeHub, settings: Settings) -> None:
    rows = data_file(settings, "org/small")
    assert ids(rows) == ["a", "b", "c"]
    assert data_file(settings, f"org/small@{FIRST}") == rows
    assert sorted(hub.fetched) == ["data/train-0.jsonl", "data/train-1.parquet"]


def test_without_a_network_the_rows_of_before_are_used(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = data_file(settings, "org/small")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert data_file(settings, "org/small") == rows
    with pytest.raises(ConfigError, match=r"is no file here, and .* is not reached"):
        data_file(settings, "org/other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/small@v2", "org/small@v2 holds no file ending in .jsonl or .parquet"),
        ("org/small@v3", "is no branch, tag or commit of the data set"),
        ("org/none", "is no file here and no public data set"),
    ],
)
def test_what_cannot_be_had_is_named(
    hub: FakeHub, settings: Settings, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        data_file(settings, name)
