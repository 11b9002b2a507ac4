"""Times of stages come from what each left: where it began in its folder, when it ended in its artifact."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from ostinato.flows.reporting.run_report import stage_times
from ostinato.flows.stages import chain
from ostinato.flows.stages.declared import START_FILE, StageStart
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.cluster.workspace import replace_text


def make(context: StageContext, name: str, parents: Sequence[ArtifactRef] = ()) -> ArtifactRef:
    def build(directory: Path) -> tuple[Path, dict]:
        return chain.one_file(directory, "file", name), {}

    return context.ensure("endpoint", {"name": name}, parents, build)


def test_ancestors_have_times_too_in_order_and_what_was_made_elsewhere_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    context = StageContext.open("miniature")
    first = make(context, "first")
    second = make(context, "second", [first])
    last = make(context, "last", [first, second])
    path = context.run_directory(first.kind, first.fingerprint) / START_FILE
    start = StageStart.model_validate_json(path.read_bytes())
    earlier = start.model_copy(update={"began_at": start.began_at - 100.0})
    replace_text(path, earlier.model_dump_json())
    (context.run_directory(second.kind, second.fingerprint) / START_FILE).unlink()
    times = stage_times(context, {"the last": last})
    assert [time.stage for time in times] == [str(first), str(second), "the last"]
    assert 100 <= float(times[0].seconds) < 160
    assert (times[1].began, times[1].seconds) == ("not here", "not known")
    assert float(times[2].seconds) < 60
    context.objects.delete(f"{first.object_prefix}/artifact.json")
    assert [time.stage for time in stage_times(context, {"last": last})] == [str(second), "last"]
