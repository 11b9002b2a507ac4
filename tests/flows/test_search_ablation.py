"""The ablation for real at a tiny size: two arms from one checkpoint, compared on the same problems."""

from pathlib import Path

import pytest

from ostinato.flows.recipe import load_recipe
from tests.benchmarks.search_ablation import compare
from tests.fakes.repositories import TWO_PACKAGES, write_archives

SHARED = """
extends = "miniature"
name = "tiny_search"

[problems.sizes]
demonstration = 12
train = 0
held_out = 4
held_out_function = 0
user = 0

[corpus]
sources = [{ kind = "package", name = "rich" }]

[corpus.demonstrations]
count = 0

[pretraining]
codebase_sources = ["code"]

[[pretraining.phases]]
name = "bulk"
blend = { library = [0.5, 0.5], repair = [0.5, 0.5] }
tokens = 8_192
sequence_tokens = 256
microbatch_tokens = 2048
global_batch_tokens = 4096

[model]
max_sequence_tokens = 768

[harness]
context_tokens = 768
result_limit_characters = 600
place_tags = true
"""
ARM = """
extends = "{parent}"
name = "tiny_search_{arm}"

[corpus.budgets]
located = 6_000

[corpus.demonstrations]
count = 24
locating = "{way}"

[harness]
search = "{ranks}"
tools = ["read_file", "edit_file", "run_terminal", "{tool}"]

[[pretraining.phases]]
name = "transcripts"
blend = {{ demonstrations = [1.0, 1.0] }}
tokens = 6_144
sequence_tokens = 768
microbatch_tokens = 3072
global_batch_tokens = 6144
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_search_ablation_compares_both_arms_and_repeats_nothing(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    write_archives(home / "cache" / "archives")
    shared = tmp_path / "tiny_search.toml"
    shared.write_text(SHARED + TWO_PACKAGES)
    for arm, way, tool, ranks in (
        ("with", "search", "codebase_search", "encoder"),
        ("without", "grep", "grep", "words"),
    ):
        text = ARM.format(parent="tiny_search", arm=arm, way=way, tool=tool, ranks=ranks)
        (tmp_path / f"tiny_search_{arm}.toml").write_text(text)

    found = compare(shared, None)

    assert found.solved_difference.count == load_recipe(str(shared)).evaluation.problems
    assert found.solved_difference.mean == pytest.approx(
        found.arms["with"].solved.mean - found.arms["without"].solved.mean
    )
    finished = {path: path.stat().st_mtime_ns for path in home.glob("runs/*/*/result.json")}
    assert compare(shared, None) == found
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
