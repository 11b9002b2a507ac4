"""The command of a GPU day: what is cut or cannot run leaves the rest; every timed part is walked on the CPU."""

import json
import time
from pathlib import Path

from ostinato.models.process_groups import open_process_groups
from tests.benchmarks import gpu_day_parts
from tests.benchmarks.gpu_day import NO_DEVICE, PARTS, Part, run_day

WRITES = "import sys; open(sys.argv[1], 'w').write('{\"rate\": 1}')"


def statuses(out: Path) -> dict[str, str]:
    return {
        name: one["status"] for name, one in json.loads((out / "summary.json").read_text()).items()
    }


def test_part_that_fails_or_hangs_leaves_the_others_results(tmp_path: Path) -> None:
    parts = (
        Part("fails", 60, ("-c", "import sys; print('why'); sys.exit(7)")),
        Part("hangs", 0.5, ("-c", "import time; time.sleep(60)")),
        Part("works", 60, ("-c", WRITES, "JSON")),
    )
    assert run_day(tmp_path, "cpu", parts, has_cuda=False, total_seconds=120) == 1
    assert statuses(tmp_path) == {
        "fails": "failed: exit code 7",
        "hangs": "failed: longer than 0 s",
        "works": "ok",
    }
    assert (tmp_path / "fails.log").read_text() == "why\n"
    assert json.loads((tmp_path / "works.json").read_text())["figures"] == {"rate": 1}


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    parts = (Part("one", 60, ("-c", "")),)
    began = time.monotonic()
    assert run_day(tmp_path, "cpu", parts, has_cuda=False, total_seconds=0.5) == 0
    assert time.monotonic() - began < 60
    assert statuses(tmp_path) == {"one": "not run: the 0 s were over"}


def test_without_a_gpu_every_part_says_so(tmp_path: Path) -> None:
    code = run_day(tmp_path, "cuda", PARTS, has_cuda=False, total_seconds=60)
    assert code == NO_DEVICE
    assert set(statuses(tmp_path).values()) == {"not run: no CUDA device"}
    assert len(statuses(tmp_path)) == len(PARTS)


def test_timed_parts_are_walked_on_the_cpu() -> None:
    assert gpu_day_parts.parity("cpu")["small"]["is_equal"]
    open_process_groups(kind="cpu")
    assert gpu_day_parts.machine("cpu")["copy_tb_per_second"] > 0
    for side, mode in (("ours", "mx128"), ("megatron", "local")):
        assert gpu_day_parts.step("cpu", side, mode)["tokens_per_second"] > 0
    assert "the device is cpu" in gpu_day_parts.step("cpu", "megatron", "engine")["not_run"]
    assert len(gpu_day_parts.reinforcement("cpu")["losses"]) == 3
