"""Object store on an S3 server and ledger on Postgres, as the settings name them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.flows.agent_training import agent_training
from ostinato.flows.stages.stage import StageContext
from tests.fakes.storage import remote_storage


@pytest.fixture
def remote_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with remote_storage(home.with_name("postgres"), home.name) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        # nothing may be reached by the AWS client's own chain of credentials
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name, raising=False)
        yield home


def test_stage_context_keeps_objects_on_the_server_that_the_settings_name(
    remote_home: Path,
) -> None:
    context = StageContext.open("miniature")
    context.objects.put_bytes("key", b"value")
    assert context.objects.list() == ["key"]
    assert context.ledger.promotions.history("tests") == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_agent_training_on_s3_and_postgres_leaves_every_artifact_there(
    prefect_server: None, remote_home: Path
) -> None:
    page = Path(agent_training("miniature"))
    assert "unseen mutations" in page.read_text()
    context = StageContext.open("miniature")
    kinds = ("problems", "corpus", "pretrained", "drafted", "reinforced", "candidate")
    for kind in kinds:
        [row] = context.ledger.artifacts.list(kind)
        assert context.objects.exists(f"{row.object_prefix}/artifact.json")
    assert any("chain" in key for key in context.objects.list())
    assert not (remote_home / "objects").exists()
    assert not (remote_home / "ledger.db").exists()
