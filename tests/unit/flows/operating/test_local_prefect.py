"""Environment of Prefect's processes."""

import os
from pathlib import Path

import pytest

from ostinato.flows.operating.local_prefect import IMPORT_ROOT, prefect_environment
from ostinato.infra.platform.settings import Settings


def test_plug_ins_on_the_python_path_of_the_user_stay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/plugins")
    path = prefect_environment(Settings(home=tmp_path), 4200)["PYTHONPATH"]
    assert path.split(os.pathsep) == [str(IMPORT_ROOT), "/somewhere/plugins"]
    monkeypatch.delenv("PYTHONPATH")
    assert prefect_environment(Settings(home=tmp_path), 4200)["PYTHONPATH"] == str(IMPORT_ROOT)
