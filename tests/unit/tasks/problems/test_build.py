"""Mutations of two tiny repositories dealt out to the splits: proven, resumed, the same by seed."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ProblemError, SandboxError
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_lines
from ostinato.tasks.problems.building import BuiltPart, RepositoryProver, read_journal
from ostinato.tasks.problems.config import (
    Kind,
    OracleConfig,
    ProblemsConfig,
    ProblemsRequest,
    PromptLevel,
    Quotas,
    SplitSizes,
    ValidityRules,
)
from ostinato.tasks.problems.proving.baseline import Baseline
from ostinato.tasks.problems.proving.judging import ProofOutcome, ProofResult
from ostinato.tasks.problems.run import prepare_parts
from ostinato.tasks.records import Split
from tests.fakes.repositories import LEDGERKIT, WORDKIT, write_archive
from tests.unit.tasks.problems.builds import build_set, check_proofs

CONFIG = ProblemsConfig(
    repositories=(WORDKIT, LEDGERKIT),
    sizes=SplitSizes(demonstration=14, train=12, held_out=6, held_out_function=3, user=3),
    functions_held_out=1,
    strip_text=True,
    plain_functions=True,
    max_function_lines=24,
    max_function_characters=600,
    max_per_function=40,
    operator_mix="noticed",
    rules=ValidityRules(
        max_failing_ratio=1.0,
        max_fail_to_pass=4,
        max_pass_to_pass=2,
        hidden_share=0.0,
        tries_right_fix=False,  # test_stub_trials.py does
    ),
    oracle=OracleConfig(enabled=False),
)


def build(tmp_path, config=CONFIG, name="run"):
    for source in config.repositories:
        write_archive(source, tmp_path / "archives")
    return build_set(tmp_path, config, name)


# By night: test_problem_sets.py builds a set, proves it and continues a killed build by day, and test_selection.py
# deals candidates out by sizes.
@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("problems")
    return directory, *build(directory)


@pytest.mark.nightly
def test_every_split_is_filled(built):
    _, result, problems = built
    assert result.num_problems == len(problems) == 38
    assert result.split_sizes == {split.value: CONFIG.sizes.of(split) for split in Split}
    assert len({problem.problem_id for problem in problems}) == len(problems)


@pytest.mark.nightly
def test_gold_passes_broken_fails_exactly_the_named_tests_and_cheats_get_nothing(built):
    check_proofs(*built)


@pytest.mark.nightly
def test_problems_are_bounded_and_say_little(built):
    for problem in built[2]:
        assert problem.fail_to_pass
        assert problem.pass_to_pass
        assert len(problem.fail_to_pass) <= CONFIG.rules.max_fail_to_pass
        assert len(problem.pass_to_pass) <= CONFIG.rules.max_pass_to_pass
        assert problem.visible_tests == (*problem.fail_to_pass, *problem.pass_to_pass)
        assert problem.prompt == f"Fix {problem.symbol} in {problem.path}"
        assert problem.first_line <= problem.edits[0].line_number <= problem.last_line


@pytest.mark.nightly
def test_held_out_mutations_and_functions_are_not_trained_on(built):
    problems = built[2]
    edits = {(p.path, p.edits[0].line_number, p.edits[0].broken_text): p.split for p in problems}
    assert len(edits) == len(problems)
    whole = {p.symbol for p in problems if p.split is Split.HELD_OUT_FUNCTION}
    assert whole
    assert not whole & {p.symbol for p in problems if p.split is not Split.HELD_OUT_FUNCTION}


@pytest.mark.nightly
def test_statistics_count_candidates(built):
    tmp_path, result, _ = built
    statistics = json.loads((tmp_path / "run" / "problems" / "statistics.json").read_text())
    assert sum(statistics["findings"].values()) == result.num_candidates
    assert statistics["num_problems"] == result.num_problems == sum(result.operators.values())
    assert 0.5 < result.yield_ratio <= 1.0


@pytest.mark.nightly
def test_killed_build_continues_from_its_journals_with_the_same_result(built):
    tmp_path, _, problems = built
    journals = {path.name: path.read_text() for path in (tmp_path / "run" / "judged").iterdir()}
    half = tmp_path / "half" / "judged"
    half.mkdir(parents=True)
    for name, text in journals.items():
        lines = text.splitlines(keepends=True)
        (half / name).write_text("".join(lines[: len(lines) // 2]) + lines[-1][:30])
    _, resumed = build(tmp_path, name="half")
    assert resumed == problems
    for name in journals:
        ids = [
            sorted(row["candidate_id"] for row in read_lines(folder / name))
            for folder in (tmp_path / "run" / "judged", half)
        ]
        assert ids[0] == ids[1]


@pytest.mark.nightly
def test_another_seed_gives_other_problems(built, tmp_path):
    sizes = SplitSizes(demonstration=4, train=4, held_out=2, held_out_function=1, user=0)
    config = CONFIG.model_copy(update={"sizes": sizes, "repositories": (WORDKIT,)})
    ids = {
        seed: [
            p.problem_id
            for p in build(tmp_path, config.model_copy(update={"seed": seed}), f"s{seed}")[1]
        ]
        for seed in (0, 1)
    }
    assert ids[0] != ids[1]


@pytest.mark.nightly
def test_described_packages_name_no_function_and_keep_to_their_split(tmp_path):
    sources = (
        WORDKIT.model_copy(update={"split": Split.HELD_OUT, "quotas": Quotas(mutation=8)}),
        LEDGERKIT.model_copy(update={"split": Split.DEMONSTRATION, "quotas": Quotas(mutation=4)}),
    )
    shares = {PromptLevel.DESCRIBED: 1.0}
    config = CONFIG.model_copy(update={"repositories": sources, "prompt_shares": shares})
    _, problems = build(tmp_path, config)
    described = [problem for problem in problems if problem.repository == "wordkit"]
    assert len(described) == 8
    assert {problem.split for problem in described} == {Split.HELD_OUT}
    assert {problem.prompt for problem in described} <= {
        "This fails in wordkit: Number of words with at least minimum letters",
        "This fails in wordkit: The first of the longest words",
        "This fails in wordkit: Words by falling count, then by alphabet",
        "This fails in wordkit: Lower case letters and digits, joined",
        "This fails in wordkit: Lines of at most width characters; a longer word has its own line",
        "This fails in wordkit: Text in the middle; an odd rest goes to the right",
        "This fails in wordkit: A mapping of key=value words; words without the separator are left"
        " out",
    }
    assert len({problem.prompt for problem in described}) > 2
    others = [problem for problem in problems if problem.repository == "ledgerkit"]
    assert others
    assert {problem.split for problem in others} == {Split.DEMONSTRATION}
    assert all(problem.symbol not in problem.prompt for problem in others)


def test_all_product_code_has_descriptions_where_no_path_is_named(tmp_path):
    write_archive(WORDKIT, tmp_path / "archives")
    workspace = Workspace.open(tmp_path, Settings(home=tmp_path))
    found = []
    for paths in ((), ("wordkit",)):
        config = CONFIG.model_copy(
            update={
                "repositories": (WORDKIT.model_copy(update={"mutated_paths": paths}),),
                "prompt_shares": {PromptLevel.DESCRIBED: 1.0},
            }
        )
        request = ProblemsRequest(config=config, archives_directory=tmp_path / "archives")
        ((part,), _) = prepare_parts(request, tmp_path / "set", workspace)
        found.append(part.descriptions)
    assert found[0] == found[1]
    assert len(found[0]) > 2


NO_BASELINE = Baseline(
    repository="wordkit",
    fingerprint="",
    tests=(),
    call_bits=(),
    num_collected=0,
    num_unstable=0,
    num_not_passing=0,
    callers={},
)


class BreakingProver(RepositoryProver):
    """Prover whose boxes break at the first candidate."""

    breaks = True

    async def _judge(self, candidate, baseline):
        if self.breaks:
            self.breaks = False
            raise SandboxError("box is gone")
        return ProofResult(candidate_id=candidate.candidate_id, finding=ProofOutcome.SURVIVED)


def test_a_box_that_breaks_is_a_finding_that_another_build_judges_again(tmp_path):
    write_archive(WORDKIT, tmp_path / "archives")
    request = ProblemsRequest(config=CONFIG, archives_directory=tmp_path / "archives")
    workspace = Workspace.open(tmp_path, Settings(home=tmp_path / "home"))
    only = request.config.model_copy(update={"repositories": (WORDKIT,)})
    request = request.model_copy(update={"config": only})
    [part], _ = prepare_parts(request, tmp_path / "prepared", workspace)
    seen = []
    prover = BreakingProver(part, CONFIG, tmp_path, 1, lambda name, finding: seen.append(finding))
    candidates = [SimpleNamespace(candidate_id=name, kind=Kind.MUTATION) for name in "ab"]

    async def judge_all():
        prover._built = BuiltPart(part, NO_BASELINE)
        try:
            return [await prover.judge(candidate) for candidate in candidates]
        finally:
            await prover.close()

    broken, judged = asyncio.run(judge_all())
    assert seen == [ProofOutcome.FAULT, ProofOutcome.SURVIVED]
    assert broken.error_message == "box is gone"
    assert set(read_journal(tmp_path / "judged" / "wordkit.jsonl")) == {judged.candidate_id}


def test_unusable_functions_are_a_clear_error(tmp_path):
    config = CONFIG.model_copy(update={"max_function_characters": 20, "repositories": (WORDKIT,)})
    with pytest.raises(ProblemError, match="no function is small enough"):
        build(tmp_path, config)
