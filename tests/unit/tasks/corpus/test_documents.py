"""Documents read as the harness would have written them; files are told apart from their copies."""

import asyncio
import itertools
import random
from pathlib import Path

import pytest

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.protocol import Sandbox, TestFailure, TestOutcome, TestReport
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.corpus.config import CorpusConfig, DemonstrationConfig
from ostinato.tasks.corpus.decontamination import Guard
from ostinato.tasks.corpus.documents import RepairMaker, draw_from
from ostinato.tasks.corpus.repairs.demonstrator import Demonstrator, repair
from ostinato.tasks.corpus.repairs.transcripts import (
    DocumentWriter,
    FailureReports,
    Plan,
    RepairScript,
    edit_call,
    place_of,
)
from ostinato.tasks.corpus.source_code.deduplication import Deduplicator, Novelty
from ostinato.tasks.corpus.source_code.functions import (
    ProblemSource,
    read_function,
    read_problem_source,
)
from ostinato.tasks.problems.breaking.drawn_mutations import draw_mutation
from tests.fakes.memory_sandbox import MemorySandbox
from tests.unit.tasks.corpus.conftest import MODULE, make_problem

RENDERER = Renderer(train_tokenizer([MODULE], vocab_size=450))
WRITER = DocumentWriter(RENDERER, ("Fix {symbol} in {path}",))
PATH, SYMBOL = "tiny/core.py", "add_all"
FUNCTION = read_function(MODULE, PATH, SYMBOL)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_repair_document_is_what_the_harness_records(is_parallel: bool) -> None:
    mutation = draw_mutation(FUNCTION.lines, random.Random(3), [4])
    assert mutation is not None
    plan = Plan(is_parallel, RepairScript.RIGHT)
    report = "failed: AssertionError: assert 1 == 2"
    written = WRITER.write_repair(
        FUNCTION, mutation, is_parallel=is_parallel, report=report, rng=random.Random(0)
    )
    broken = MODULE.replace(mutation.gold_text, mutation.broken_text)

    async def run_tests(sandbox: Sandbox) -> TestReport:
        if await sandbox.read(PATH) == MODULE.encode():
            return TestReport(outcomes={"t": TestOutcome.PASSED}, route="hot", seconds=0)
        failure = TestFailure(
            test_id="t", error_type="AssertionError", message="assert 1 == 2", frames=()
        )
        outcomes = {"t": TestOutcome.FAILED}
        return TestReport(outcomes=outcomes, first_failure=failure, route="hot", seconds=0)

    right = edit_call(mutation.line_number, mutation.gold_text)
    model = Demonstrator(RENDERER, repair(plan, place_of(PATH, SYMBOL), right=right, wrong=""))
    environment = AgentEnvironment(MemorySandbox({PATH: broken.encode()}), run_tests)
    request = AgentRequest(prompt=f"Fix {SYMBOL} in {PATH}", session_id="s")
    config = HarnessConfig(context_tokens=2000, max_generated_tokens=2000)
    transcript = asyncio.run(run_agent(model, RENDERER, environment, request, config))
    recorded = transcript.segments[0].token_ids_T.tolist()
    assert written == [*recorded, RENDERER.end_of_text_id]


def test_a_fill_in_document_ends_with_the_edit_that_fills_it_in() -> None:
    text = RENDERER.decode(WRITER.write_fill_in(FUNCTION, 2))
    assert "<L1>def add_all(values, start=0):\n<L2>\n<L3>    for value" in text
    assert text.endswith("<edit_file><L2>    total = start</edit_file><|end|><|endoftext|>")


def test_a_clean_document_shows_the_function() -> None:
    text = RENDERER.decode(WRITER.write_clean(FUNCTION))
    assert text.startswith(
        "<|assistant|><read_file>tiny/core.py::add_all</read_file><|end|><|tool|>"
    )
    assert text.endswith("<L5>    return total<|end|><|endoftext|>")


def test_copies_are_told_from_news() -> None:
    deduplicator = Deduplicator(near_duplicate_ratio=0.7)
    text = "\n".join(f"line {index} of a file" for index in range(60))
    assert deduplicator.judge(text) is Novelty.NEW
    assert deduplicator.judge(text.replace("\n", "\n\n  ")) is Novelty.EXACT_DUPLICATE
    assert deduplicator.judge(text.replace("line 7 ", "row 7 ")) is Novelty.NEAR_DUPLICATE
    assert deduplicator.judge(text.replace("line", "row")) is Novelty.NEW
    assert deduplicator.judge("x") is Novelty.NEW


def test_prompts_become_templates(problems_directory: Path) -> None:
    source = read_problem_source(problems_directory)
    assert source.prompt_templates() == ("Fix {symbol} in {path}",)
    assert ProblemSource().prompt_templates() == ("Fix {symbol} in {path}",)


def test_problems_of_other_files_are_refused(problems_directory: Path) -> None:
    problem = make_problem("0" * 16, 0)
    with pytest.raises(ProblemError, match="tiny-0"):
        problem.break_files({problem.path: b"x\n"})
    file = problems_directory / "problems.jsonl"
    file.write_text(make_problem("0" * 16, 0).model_dump_json())
    with pytest.raises(ProblemError, match="fingerprint"):
        read_problem_source(problems_directory)
    with pytest.raises(ProblemError, match=r"no problems\.jsonl"):
        read_problem_source(problems_directory / "nowhere")


def test_a_rare_kind_of_bug_still_fills_its_budget() -> None:
    calls = itertools.count(1)
    config = CorpusConfig()
    maker = RepairMaker("repair", WRITER, config, Guard([]), FailureReports())
    documents = maker.make(draw_from([FUNCTION]), 300, lambda bug: next(calls) % 300 == 0)
    assert sum(map(len, documents)) >= 300


def test_impossible_configs_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted at most 1"):
        DemonstrationConfig(wrong_first_share=0.8, give_up_share=0.3)
