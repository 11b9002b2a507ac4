"""Repairs for models that other people trained: the calls mend the file, and only answers are trained on."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.dialect import catalogue_of, dialect_of
from ostinato.infra.agent.dialects.edits.blocks import read_edits
from ostinato.infra.agent.dialects.full.calls import parse_calls
from ostinato.infra.agent.extensions import FULL
from ostinato.infra.agent.tools.matching import replace_text
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.settings import Settings
from ostinato.models.rendering import load_renderer
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.corpus.config import (
    CodeSource,
    CorpusConfig,
    CorpusRequest,
    DemonstrationConfig,
    TokenBudgets,
)
from ostinato.tasks.corpus.repairs.demonstrator import write_repair
from ostinato.tasks.corpus.run import main as build_corpus
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.records import LineEdit, Problem, Split
from tests.fakes.published_model import write_published_model

HARNESS = HarnessConfig(
    dialect=FULL,
    tools=("edit_file",),
    system_prompt="Repair it.",
    shown_lines=8,
    max_turns=2,
    max_generated_tokens=800,
    context_tokens=2000,
)
PATH = "pkg/core.py"
WHOLE = "def first():\n    return 1\n\n\ndef second(n):\n    if n:\n        return 2\n    n += 1\n    return 1\n"


def problem_with(**edits: str) -> Problem:
    """`second`, with these lines of the file broken."""
    lines = WHOLE.split("\n")
    return Problem(
        problem_id="p",
        repository="pkg",
        repository_fingerprint="f",
        kind="mutation",
        path=PATH,
        symbol="second",
        first_line=5,
        last_line=9,
        prompt="Fix second",
        edits=tuple(
            LineEdit(path=PATH, line_number=number, gold_text=lines[number - 1], broken_text=text)
            for number, text in ((int(name[1:]), text) for name, text in edits.items())
        ),
        split=Split.TRAIN,
    )


@pytest.mark.parametrize(
    "edits", [{"L7": "    return 1"}, {"L8": ""}, {"L6": "    if not n:", "L8": "    n += 2"}]
)
def test_the_calls_of_a_repair_are_exact_and_give_the_whole_file(edits: dict[str, str]) -> None:
    problem = problem_with(**edits)
    broken = problem.break_files({PATH: WHOLE.encode()})
    written = write_repair(problem, broken, HARNESS)
    assert written is not None
    parsed = parse_calls(written, catalogue_of(HARNESS))
    text = broken[PATH].decode()
    assert len(parsed.calls) == len(edits)
    for call in parsed.calls:
        assert call.values["path"] == PATH
        old, new = str(call.values["old"]), str(call.values["new"])
        text = replace_text(text, old, new, all_of_them=False, exact=True).text
    assert text == WHOLE


@pytest.mark.parametrize("edits", ["search_replace", "udiff", "whole_function"])
def test_a_repair_in_a_form_of_edits_is_read_back(edits: str) -> None:
    harness = HARNESS.model_copy(update={"edits": edits})
    problem = problem_with(L6="    if not n:", L8="    n += 2")
    broken = problem.break_files({PATH: WHOLE.encode()})
    written = write_repair(problem, broken, harness)
    assert written is not None
    text = broken[PATH].decode()
    for call in read_edits(written, edits, catalogue_of(HARNESS)).calls:
        assert call.error == ""
        if edits == "whole_function":
            assert call.arguments["new"] in WHOLE
            return
        old, new = call.arguments["old"], call.arguments["new"]
        text = replace_text(text, old, new, all_of_them=False, exact=True).text
    assert text == WHOLE


@pytest.mark.parametrize(("dialect", "few"), [("hermes", 2), ("llama3", 1)])
def test_a_repair_is_written_in_the_dialect(dialect: str, few: int) -> None:
    harness = HARNESS.model_copy(update={"dialect": dialect})
    for edits in ({"L7": "    return 1"}, {"L6": "    if not n:", "L8": "    n += 2"}):
        problem = problem_with(**edits)
        written = write_repair(problem, problem.break_files({PATH: WHOLE.encode()}), harness)
        assert (written is not None) == (len(edits) <= few)
        if written is not None:
            parsed = dialect_of(harness).parse(written, catalogue_of(harness))
            assert [call.error for call in parsed.calls] == [""] * len(edits)


def test_a_wrong_line_that_the_prompt_does_not_show_is_no_demonstration() -> None:
    problem = problem_with(L8="    n += 3")
    broken = problem.break_files({PATH: WHOLE.encode()})
    assert write_repair(problem, broken, HARNESS.model_copy(update={"shown_lines": 4}))
    assert write_repair(problem, broken, HARNESS.model_copy(update={"shown_lines": 3})) is None


@pytest.mark.timeout(120)
def test_demonstrations_of_an_imported_model_train_on_answers_alone(
    tmp_path: Path, problems_directory: Path
) -> None:
    write_published_model(tmp_path / "in")
    import_model(str(tmp_path / "in"), tmp_path / "base", tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "one.py").write_text("def one():\n    return 1\n")
    splits = (Split.DEMONSTRATION, Split.TRAIN)
    config = CorpusConfig(
        sources=(CodeSource(kind="directory", name="code", path=str(tmp_path / "code")),),
        budgets=TokenBudgets(code=0, library=0, repair=0, repair_general=0),
        demonstrations=DemonstrationConfig(count=4, boxes_per_repository=1, splits=splits),
    )
    request = CorpusRequest(
        config=config,
        problems_directory=str(problems_directory),
        harness=HARNESS,
        tokenizer_path=str(tmp_path / "base"),
    )
    (tmp_path / "corpus").mkdir()
    result = build_corpus(request, Workspace.open(tmp_path / "corpus", Settings(home=tmp_path)))

    assert result.demonstrations_by_plan == {"plain": 4}
    renderer = load_renderer(tmp_path / "corpus")
    arrays = load_file(tmp_path / "corpus" / "demonstrations.safetensors")
    answers = []
    for start, end in zip(arrays["offsets"], arrays["offsets"][1:], strict=False):
        ids, mask = arrays["token_ids"][start:end], arrays["loss_mask"][start:end].astype(bool)
        text, trained = renderer.decode(ids.tolist()), renderer.decode(ids[mask].tolist())
        assert text.startswith("<|im_start|>system\nRepair it.<|im_end|>\n<|im_start|>user\n")
        assert "tiny/core.py (from line" in text
        assert trained.startswith('<call tool="edit_file">')
        assert trained.endswith("</call><|im_end|>Fixed.<|im_end|>")
        assert np.flatnonzero(mask)[0] > 0
        answers.append(trained)
    wanted = {
        edit.gold_text
        for problem in load_problems(problems_directory)
        if problem.split in splits
        for edit in problem.edits
    }
    assert all(any(line in answer for answer in answers) for line in wanted)
