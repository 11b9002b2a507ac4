"""A set over two tiny repositories: gold passes, broken fails, splits by repository, and a killed
build that ends in the same set.
"""

import json

import pytest
import zstandard
from pydantic import TypeAdapter

from ostinato.flows.reporting.showing import describe_problems
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.telemetry import read_lines
from ostinato.tasks.problems.config import (
    Kind,
    ProblemsConfig,
    PromptLevel,
    Quotas,
    RepositorySource,
    ValidityRules,
)
from ostinato.tasks.problems.shipped import check_repositories, find_set, shipped_checksum
from ostinato.tasks.records import FunctionOracle, Split
from tests.benchmarks.problem_verification import agreed_lines, compare_with_shipped, ship_set
from tests.fakes.repositories import LEDGERKIT, WORDKIT, write_archive, write_archives
from tests.unit.tasks.problems.builds import build_set, check_proofs, load

ORACLES = TypeAdapter(list[FunctionOracle])
GONE = RepositorySource(
    name="ledgerkit-gone", version="1.0", package_paths=("nothing",), test_paths=("tests",)
)
CONFIG = ProblemsConfig(
    repositories=(
        WORDKIT.model_copy(update={"mutated_paths": (), "split": Split.TRAIN}),
        LEDGERKIT.model_copy(update={"mutated_paths": (), "split": Split.HELD_OUT}),
        GONE,
    ),
    quotas=Quotas(
        mutation=6,
        deleted_function=4,
        deleted_feature=6,
        combined=2,
        multi_place=2,
        refactoring=1,
        trials_ratio=2,
    ),
    feature_ways=("symbol", "skeleton", "subject"),
    rules=ValidityRules(max_failing_ratio=0.6, cheater_share=0.5, tries_right_fix=False),
    prompt_shares={PromptLevel.DETAILED: 0.3, PromptLevel.TERSE: 0.5, PromptLevel.VAGUE: 0.2},
)


def build(tmp_path, name="run"):
    write_archives(tmp_path / "archives")
    write_archive(LEDGERKIT, tmp_path / "archives", GONE)
    return build_set(tmp_path, CONFIG, name, parallel_runs=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sets")
    return directory, *build(directory)


def test_every_kind_is_published(built):
    kinds = {problem.kind for problem in built[2]}
    # test_replies.py builds questions and no-edit problems
    of_others = {Kind.MINED_COMMIT, Kind.GIVEN, Kind.QUESTION, Kind.NO_EDIT}
    assert kinds == {kind.value for kind in {*Kind} - of_others}
    assert len({problem.problem_id for problem in built[2]}) == built[1].num_problems


def test_whole_passes_broken_fails_the_named_tests_and_cheats_get_nothing(built):
    check_proofs(*built)


def test_splits_share_no_repository(built):
    splits = {}
    for problem in built[2]:
        splits.setdefault(problem.repository, set()).add(problem.split)
    assert splits == {"wordkit": {Split.TRAIN}, "ledgerkit": {Split.HELD_OUT}}


def test_hidden_tests_judge_but_are_not_in_what_the_agent_sees(built):
    tmp_path, _, problems = built
    hiding = [problem for problem in problems if problem.hidden_tests]
    assert hiding
    for problem in hiding:
        repository = load(tmp_path, problem.repository)
        seen = {**repository.files, **problem.break_files(repository.files)}
        assert set(problem.hidden_tests) <= set(problem.fail_to_pass)
        assert not set(problem.hidden_tests) & set(problem.visible_tests)
        for test in problem.hidden_tests:
            path, _, name = test.partition("[")[0].partition("::")
            assert f"def {name}(".encode() not in seen[path]


def test_prompts_do_not_tell(built):
    for problem in built[2]:
        text = problem.prompt
        assert text
        assert not any(test.rpartition("::")[2] in text for test in problem.hidden_tests)
        gold = [edit.gold_text.strip() for edit in problem.edits]
        assert not any(line in text for line in gold if len(line) > 12)


def test_a_source_that_gives_nothing_is_named_with_the_reason(built):
    result = built[1]
    assert list(result.left_out) == ["ledgerkit-gone"]
    assert "holds nothing at 'nothing'" in result.left_out["ledgerkit-gone"]
    card = "\n".join(describe_problems(result))
    assert "left out ledgerkit-gone: ledgerkit-gone: the source holds nothing" in card
    assert "no problem for demonstration, held_out_function, user" in card
    assert "operators: " in card


def test_statistics_and_yield_table_agree_with_the_problems(built):
    tmp_path, result, problems = built
    made = tmp_path / "run" / "problems"
    figures = json.loads((made / "statistics.json").read_text())
    rows = figures["yield_table"]
    assert sum(row["published"] for row in rows) == figures["num_problems"] == len(problems)
    assert sum(row["tried"] for row in rows) == result.num_candidates
    assert sum(figures["operators"].values()) == sum(figures["kinds"].values()) == len(problems)


def test_a_problem_carries_the_held_out_calls_of_its_function(built):
    tmp_path, _, problems = built
    oracles = {
        (name, item.path, item.symbol): item
        for name in ("wordkit", "ledgerkit")
        for item in ORACLES.validate_json(
            (tmp_path / "run" / "oracles" / f"{name}.json").read_bytes()
        )
    }
    assert any(problem.oracle is not None for problem in problems)
    for problem in problems:
        made = oracles.get((problem.repository, problem.path, problem.symbol))
        assert (problem.oracle is None) == (made is None)
        if problem.oracle is not None and made is not None:
            assert problem.oracle.held_out == made.held_out
            assert problem.oracle.visible == ()


def test_killed_build_continues_with_the_same_set(built):
    """Killed amid the first repository; the other was finished."""
    tmp_path, _, problems = built
    half = tmp_path / "half"
    for kind in ("judged", "baselines", "oracles"):
        (half / kind).mkdir(parents=True)
    for name in ("wordkit", "ledgerkit"):
        for part in (f"baselines/{name}.json", f"judged/{name}.jsonl"):
            (half / part).write_text((tmp_path / "run" / part).read_text())
    lines = (tmp_path / "run" / "judged" / "wordkit.jsonl").read_text().splitlines(keepends=True)
    cut = "".join(lines[: len(lines) // 2]) + lines[-1][:30]
    (half / "judged" / "wordkit.jsonl").write_text(cut)
    _, resumed = build(tmp_path, name="half")
    assert resumed == problems
    assert len(read_lines(half / "judged" / "wordkit.jsonl")) == len(lines)


def test_a_shipped_set_is_taken_as_it_is_and_only_for_its_configuration(built, tmp_path):
    source, result, _ = built
    lines = (source / "run" / "problems" / "problems.jsonl").read_bytes()
    card = ship_set("tiny", CONFIG, result, lines, tmp_path / "sets")
    assert card.result == result.model_copy(update={"directory": ""})
    found = find_set(CONFIG, tmp_path / "sets")
    assert found == (card, lines)
    assert shipped_checksum(CONFIG, tmp_path / "sets") == card.sha256
    assert compare_with_shipped(lines, lines) == []
    rest = lines.partition(b"\n")[2]
    assert "1 of" in compare_with_shipped(rest, lines)[0]
    assert compare_with_shipped(lines, rest) == []
    assert find_set(CONFIG.model_copy(update={"seed": 1}), tmp_path / "sets") is None
    packed = tmp_path / "sets" / "tiny.jsonl.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(lines + b"\n"))
    with pytest.raises(ProblemError, match="wanted " + card.sha256):
        find_set(CONFIG, tmp_path / "sets")


def test_what_two_builds_made_alike_ships_and_is_counted(built, tmp_path):
    source, result, problems = built
    lines = (source / "run" / "problems" / "problems.jsonl").read_bytes()
    first, rest = lines.split(b"\n", 1)
    agreed = agreed_lines(lines, first.replace(b'"prompt"', b'"other"') + b"\n" + rest)
    card = ship_set("tiny", CONFIG, result, agreed, tmp_path)
    assert agreed == rest
    counted = card.result
    assert counted.num_problems == len(problems) - 1
    for figures in (counted.split_sizes, counted.kinds, counted.operators):
        assert sum(figures.values()) == counted.num_problems
    assert sum(int(row["published"]) for row in counted.yield_table) == counted.num_problems


def test_a_shipped_set_refuses_repositories_it_was_not_proven_on(built, tmp_path):
    card = ship_set("tiny", CONFIG, built[1], b"", tmp_path)
    check_repositories(card, built[1].repositories)
    with pytest.raises(ProblemError, match="ledgerkit"):
        check_repositories(card, built[1].repositories | {"ledgerkit": "0" * 16})
