"""Code of a directory, a package, a commit of git, and rows here or in a bucket: what is read, pinned and refused."""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.corpus.config import (
    CodeSource,
    CorpusConfig,
    CorpusRequest,
    DemonstrationConfig,
    TokenBudgets,
)
from ostinato.tasks.corpus.run import main as build_corpus
from ostinato.tasks.corpus.source_code.sources import (
    SourceFile,
    package_licence,
    pin_sources,
    read_source,
)
from tests.fakes.storage import BUCKET, s3_server

CODE = "x = 1\n" * 60
MODULES = {
    "zoo/first.py": '"""Caf\xe9."""\n'
    + "".join(f"def first_{i}(a):\n    b = a + {i}\n    return b\n" for i in range(30)),
    "second.py": "".join(
        f"def second_{i}(a):\n    b = a * {i}\n    return b\n\n" for i in range(30)
    ),
    "third.py": "".join(f"class Third{i}:\n    number = {i}\n    name = 'a'\n" for i in range(30)),
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


@pytest.fixture(scope="module")
def s3_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    with s3_server() as settings:
        home = tmp_path_factory.mktemp("home")
        yield settings.model_copy(update={"home": home, "cache_directory": home / "cache"})


def put(settings: Settings, local: Path, key: str) -> str:
    """Copies a file into the bucket. Returns its URL."""
    assert settings.s3_secret_access_key is not None
    files = fsspec.filesystem(
        "s3",
        key=settings.s3_access_key_id,
        secret=settings.s3_secret_access_key.get_secret_value(),
        endpoint_url=settings.s3_endpoint_url,
    )
    files.put_file(str(local), f"{BUCKET}/{key}")
    return f"s3://{BUCKET}/{key}"


def read(source: CodeSource, settings: Settings) -> list[SourceFile]:
    (pin,) = pin_sources([source], settings)
    return list(read_source(source, pin, settings, Counter()))


def write_modules(folder: Path) -> Path:
    for name, text in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write_rows(path: Path, columns: tuple[str, str] = ("text", "path")) -> Path:
    text, name = columns
    rows = [{text: code, name: where, "stars": 3} for where, code in sorted(MODULES.items())]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_git(folder: Path, *arguments: str) -> str:
    person = ["-c", "user.name=A Person", "-c", "user.email=a@example.org"]
    command = ["git", *person, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> str:
    for arguments in (("init", "-q", "-b", "main"), ("add", "-A"), ("commit", "-q", "-m", "all")):
        run_git(folder, *arguments)
    return run_git(folder, "rev-parse", "HEAD")


def test_the_same_files_give_the_same_shards_by_every_route(
    tmp_path: Path, s3_settings: Settings
) -> None:
    folder = write_modules(tmp_path / "code")
    revision = commit(write_modules(tmp_path / "history"))
    lines, table = write_rows(tmp_path / "rows.jsonl"), write_rows(tmp_path / "rows.parquet")
    put(s3_settings, lines, f"{tmp_path.name}/rows/part-0.jsonl")
    put(s3_settings, table, f"{tmp_path.name}/rows/part-0.parquet")
    rows = f"s3://{BUCKET}/{tmp_path.name}/rows/"
    routes = {
        "directory": CodeSource(kind="directory", path=str(folder)),
        "git": CodeSource(kind="git", path=str(tmp_path / "history"), revision=revision),
        "url": CodeSource(kind="git", path=f"file://{tmp_path}/history", revision="main"),
        "jsonl": CodeSource(kind="jsonl", path=str(lines)),
        "parquet": CodeSource(kind="parquet", path=str(table)),
        "s3-jsonl": CodeSource(kind="jsonl", path=rows),
        "s3-parquet": CodeSource(kind="parquet", path=rows),
    }
    shards, licences = {}, {}
    for route, source in routes.items():
        named = source.model_copy(update={"name": "code", "licence": "MIT"})
        config = CorpusConfig(
            sources=(named,),
            vocab_size=400,
            budgets=TokenBudgets(code=4000, library=0, repair=0, repair_general=0),
            demonstrations=DemonstrationConfig(count=0),
            held_out_share=0.4,
        )
        place = tmp_path / "out" / route
        place.mkdir(parents=True)
        request = CorpusRequest(config=config, problems_directory="")
        result = build_corpus(request, Workspace.open(place, s3_settings))
        assert result.files_read == len(MODULES)
        assert result.sources == (f"{source.path} at {pin_sources([source], s3_settings)[0]}",)
        licences[route] = result.licences
        shards[route] = {
            file.name: file.read_bytes() for file in sorted((place / "shards").iterdir())
        }
    assert "code_train.bin" in shards["directory"]
    assert "code_heldout.bin" in shards["directory"]
    assert all(shards[route] == shards["directory"] for route in routes)
    assert all(licences[route] == licences["directory"] for route in routes)


def test_a_commit_is_read_as_it_was_and_nothing_of_the_repository_is_run(
    tmp_path: Path, settings: Settings
) -> None:
    place, marker = write_modules(tmp_path / "code"), tmp_path / "ran"
    (place / ".gitattributes").write_text("*.py filter=evil ident export-ignore\n")
    (place / "large.py").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 12345\n"
    )
    (place / "linked.py").symlink_to("second.py")
    (place / "tests").mkdir()
    (place / "tests" / "test_it.py").write_text(CODE)
    first = commit(place)
    run_git(place, "update-index", "--add", "--cacheinfo", f"160000,{first},inner")
    run_git(place, "commit", "-q", "-m", "a submodule")
    run_git(place, "tag", "v1")
    (place / "second.py").write_text(CODE)
    later = commit(place)
    for name in ("smudge", "clean", "process"):
        run_git(place, "config", f"filter.evil.{name}", f"touch {marker}")
    for name in ("core.fsmonitor", "core.sshCommand", "uploadpack.packObjectsHook"):
        run_git(place, "config", name, f"touch {marker}")
    for name in ("post-checkout", "reference-transaction", "pre-auto-gc", "post-merge"):
        (place / ".git" / "hooks" / name).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (place / ".git" / "hooks" / name).chmod(0o755)
    for path in (str(place), f"file://{place}"):
        old, new = (
            CodeSource(kind="git", path=path, revision=name, licence="MIT")
            for name in ("v1", "main")
        )
        pins = pin_sources([old, new], settings)
        assert pins[1] == later
        dropped: Counter[str] = Counter()
        files = list(read_source(old, pins[0], settings, dropped))
        assert {file.path: file.text for file in files} == MODULES
        assert {(file.source, file.licence) for file in files} == {("code", "MIT")}
        assert dropped == {"submodule": 1, "lfs_pointer": 1}
        read_later = {file.path: file.text for file in read(new, settings)}
        assert read_later["second.py"] == CODE
    assert not marker.exists()
    # a plain git would have
    subprocess.run(["git", "-C", str(place), "checkout", "-q", "-f", "v1"], capture_output=True)
    assert marker.exists()


def test_a_branch_that_moves_is_another_pin_and_a_commit_stays(
    tmp_path: Path, settings: Settings
) -> None:
    place = write_modules(tmp_path / "code")
    first = commit(place)
    url = f"file://{place}"
    branch = CodeSource(kind="git", path=url, revision="main")
    pinned = CodeSource(kind="git", path=url, revision=first)
    before = pin_sources([branch, pinned], settings)
    (place / "second.py").write_text(CODE)
    second = commit(place)
    assert (before, pin_sources([branch, pinned], settings)) == ((first, first), (second, first))
    # the child of a stage reads the commit that the flow saw, also when the branch moved meanwhile
    texts = {file.path: file.text for file in read_source(branch, first, settings, Counter())}
    assert texts == MODULES
    place.rename(tmp_path / "gone")
    assert {file.path for file in read(pinned, settings)} == set(MODULES)  # asks nobody
    with pytest.raises(ConfigError, match="revision 'main'"):
        pin_sources([branch], settings)


def test_a_changed_file_or_object_is_another_pin(tmp_path: Path, s3_settings: Settings) -> None:
    folder, lines = write_modules(tmp_path / "code"), write_rows(tmp_path / "rows.jsonl")
    url = put(s3_settings, lines, f"{tmp_path.name}/rows.jsonl")
    sources = [
        CodeSource(kind="directory", path=str(folder)),
        CodeSource(kind="jsonl", path=str(lines)),
        CodeSource(kind="jsonl", path=url),
        CodeSource(kind="package", name="json"),
    ]
    before = pin_sources(sources, s3_settings)
    assert pin_sources(sources, s3_settings) == before
    (folder / "second.py").write_text(CODE)
    lines.write_text(json.dumps({"text": CODE, "path": "a.py"}) + "\n")
    put(s3_settings, lines, f"{tmp_path.name}/rows.jsonl")
    after = pin_sources(sources, s3_settings)
    assert [old != new for old, new in zip(before, after, strict=True)] == [True, True, True, False]
    with pytest.raises(ConfigError, match="changed after the stage began"):
        list(read_source(sources[2], before[2], s3_settings, Counter()))


def test_columns_have_the_names_of_the_recipe(tmp_path: Path, settings: Settings) -> None:
    for name in ("rows.parquet", "rows.jsonl"):
        path = write_rows(tmp_path / name, ("content", "file"))
        source = CodeSource(
            kind="parquet" if name.endswith("parquet") else "jsonl",
            path=str(path),
            text_column="content",
            path_column="file",
        )
        assert {file.path: file.text for file in read(source, settings)} == MODULES


def test_a_folder_of_rows_is_read_by_name(tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": CODE, "path": f"{name}.py"}))
    (folder / "notes.txt").write_text("no rows")
    files = read(CodeSource(kind="jsonl", path=str(folder)), settings)
    assert [(file.source, file.path) for file in files] == [("a", "a.py"), ("b", "b.py")]


def test_a_git_source_that_cannot_be_read_is_named(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_modules(tmp_path / "code")
    commit(place)
    source = CodeSource(kind="git", name="shop", path=str(place), revision="no-such")
    for path in (str(place), f"file://{place}"):
        one = source.model_copy(update={"path": path})
        with pytest.raises(ConfigError, match=r"'shop'.*path is .*revision 'no-such', wanted"):
            pin_sources([one], settings)
    for path in (str(tmp_path), str(tmp_path / "nowhere")):
        with pytest.raises(ConfigError, match="wanted a git repository"):
            pin_sources([source.model_copy(update={"path": path})], settings)
    run_git(place, "config", "remote.origin.promisor", "true")
    with pytest.raises(ConfigError, match=r"remote\.origin\.promisor is set.*wanted a full one"):
        pin_sources([source.model_copy(update={"revision": "main"})], settings)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no program git is on PATH"):
        pin_sources([source], settings)


def test_rows_that_cannot_be_read_are_named(tmp_path: Path, settings: Settings) -> None:
    table = str(write_rows(tmp_path / "rows.parquet"))
    with pytest.raises(ConfigError, match=r"text_column is 'code', wanted .*: text, path, stars"):
        pin_sources([CodeSource(kind="parquet", path=table, text_column="code")], settings)
    with pytest.raises(ConfigError, match="licence_column is 'rights', wanted"):
        pin_sources([CodeSource(kind="parquet", path=table, licence_column="rights")], settings)
    lines = str(write_rows(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: code: Field required"):
        pin_sources([CodeSource(kind="jsonl", path=lines, text_column="code")], settings)
    with pytest.raises(ConfigError, match=r"rows\.jsonl is not read as parquet"):
        pin_sources([CodeSource(kind="parquet", path=lines)], settings)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"no file was found, wanted .*\.parquet"):
            pin_sources([CodeSource(kind="parquet", path=str(path))], settings)
    rows = pyarrow.Table.from_pylist([{"text": 5, "path": "a.py"}])
    pyarrow.parquet.write_table(rows, tmp_path / "numbers.parquet")
    source = CodeSource(kind="parquet", path=str(tmp_path / "numbers.parquet"))
    with pytest.raises(ConfigError, match=r"numbers\.parquet, row 1: text: Input should be a"):
        read(source, settings)


def test_a_bucket_that_cannot_be_read_is_named(
    tmp_path: Path, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CodeSource(kind="jsonl", name="rows", path="s3://no-such-bucket/rows")
    with pytest.raises(ConfigError, match=r"'rows'.*s3://no-such-bucket/rows.*no such .*bucket"):
        pin_sources([source], s3_settings)
    nothing = source.model_copy(update={"path": f"s3://{BUCKET}/nothing/here"})
    with pytest.raises(ConfigError, match=r"no file was found, wanted"):
        pin_sources([nothing], s3_settings)
    nowhere = source.model_copy(update={"path": "s3:///rows"})
    with pytest.raises(ConfigError, match=r"wanted .*s3://bucket/prefix"):
        pin_sources([nowhere], s3_settings)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    keyless = s3_settings.model_copy(
        update={"s3_access_key_id": None, "s3_secret_access_key": None}
    )
    with pytest.raises(ConfigError, match="set OSTINATO_S3_ACCESS_KEY_ID"):
        pin_sources([nothing], keyless)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "jsonl"}, "no path"),
        ({"kind": "package"}, "import name"),
        ({"kind": "git", "path": "x"}, "revision '', wanted a commit"),
        ({"kind": "directory", "path": "x", "revision": "v1"}, "revision 'v1', wanted none"),
        ({"kind": "git", "path": "x", "revision": "a", "text_column": "b"}, "text_column 'b'"),
        ({"kind": "git", "path": "https://me:key@host/x", "revision": "a"}, "with a password"),
    ],
)
def test_impossible_sources_are_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeSource.model_validate(fields)


def test_sources_are_read_with_their_licence(tmp_path: Path, settings: Settings) -> None:
    assert package_licence("pytest") == "MIT"
    assert package_licence("no_such_package") == "unknown"
    lines = [json.dumps({"text": "x = 1\n" * 60, "path": "a.py"})]
    (tmp_path / "code.jsonl").write_text("\n".join(lines))
    source = CodeSource(kind="jsonl", path=str(tmp_path / "code.jsonl"), licence="CC0-1.0")
    (file,) = read(source, settings)
    assert (file.path, file.licence, file.source) == ("a.py", "CC0-1.0", "code")
    modules = {file.path for file in read(CodeSource(kind="package", name="json"), settings)}
    assert modules == {"decoder.py", "encoder.py", "scanner.py", "__init__.py", "tool.py"}


def test_bad_sources_are_named(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(ConfigError, match="no_such_package"):
        read(CodeSource(kind="package", name="no_such_package"), settings)
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl:1"):
        read(CodeSource(kind="jsonl", path=str(tmp_path / "bad.jsonl")), settings)
    with pytest.raises(ConfigError, match="missing"):
        read(CodeSource(kind="directory", path=str(tmp_path / "missing")), settings)


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": 5, "path": "a.py"}',
        b'{"text": null, "path": "a.py"}',
        b'{"text": "x", "path": ["a.py"]}',
        b'{"text": "caf\xe9", "path": "a.py"}',
        b"[" * 100_000,
        b'"text"',
    ],
)
def test_a_bad_line_of_code_is_named(tmp_path: Path, settings: Settings, line: bytes) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "x", "path": "a.py"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=r"bad.jsonl:2"):
        read(CodeSource(kind="jsonl", path=str(tmp_path / "bad.jsonl")), settings)


def test_only_files_of_the_folder_itself_are_read(tmp_path: Path, settings: Settings) -> None:
    code, folder = "x = 1\n" * 60, tmp_path / "code"
    (folder / "folder.py").mkdir(parents=True)
    (folder / "kept.py").write_text(code)
    (tmp_path / "secret.py").write_text(code)
    (folder / "link.py").symlink_to(tmp_path / "secret.py")
    (folder / "dangling.py").symlink_to(tmp_path / "nothing.py")
    (folder / "linked").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.py")
    files = read(CodeSource(kind="directory", path=str(folder)), settings)
    assert [file.path for file in files] == ["kept.py"]
