"""What the sources of a corpus hold is part of its identity and stands in its lineage."""

from pathlib import Path

import pytest

from ostinato.flows.stages import chain, stage
from ostinato.flows.stages.forms import RunOptions
from ostinato.flows.stages.lineage import SOURCES
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.corpus.config import CodeSource, CorpusRequest, CorpusResult
from ostinato.tasks.corpus.source_code.sources import pin_sources


def test_a_changed_source_is_another_corpus_and_a_missing_one_begins_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    asked: list[CorpusRequest] = []

    def build(_: str, __: str, request: CorpusRequest, *___: object) -> CorpusResult:
        asked.append(request)
        place = tmp_path / "home" / "runs" / "made"
        (place / "shards").mkdir(parents=True, exist_ok=True)
        return CorpusResult(
            directory=str(place), vocab_size=400, shards=(), demonstrations=0, demonstration_tokens=0,
            demonstrations_by_plan={}, sources=("code at 1",), files_read=0, files_dropped={},
            documents_decontaminated=0, licences={},
        )  # fmt: skip

    def corpus_files(directory: Path) -> Path:
        return chain.one_file(directory, "statistics.json", "{}")

    monkeypatch.setattr(stage, "run_stage", build)
    monkeypatch.setattr(chain, "corpus_files", corpus_files)
    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text("x = 1\n" * 60)
    recipe = tmp_path / "own.toml"
    source = f'{{ kind = "directory", path = "{code}" }}'
    recipe.write_text(f'extends = "miniature"\nname = "own"\n[corpus]\nsources = [{source}]\n')
    context = StageContext.open(str(recipe), options=RunOptions())
    problems = context.ensure(
        "problems", {}, (), lambda place: (chain.one_file(place, "problems.jsonl", ""), {})
    )

    first = chain.build_corpus(context, problems)
    assert chain.build_corpus(context, problems) == first
    (code / "a.py").write_text("x = 2\n" * 60)
    second = chain.build_corpus(context, problems)
    assert second.fingerprint != first.fingerprint
    pins = [request.pins for request in asked]
    assert len(set(pins)) == len(pins) == 2
    read = CodeSource(kind="directory", path=str(code))
    assert pins[1] == pin_sources([read], Settings(home=tmp_path))
    assert context.artifacts.manifest(first).metadata[SOURCES] == ["code at 1"]
    (code / "a.py").unlink()
    code.rmdir()
    with pytest.raises(ConfigError, match="no directory"):
        chain.build_corpus(context, problems)
    assert len(asked) == 2
