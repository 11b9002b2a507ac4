"""Demonstrations of several segments: new beginnings and summaries, through the agents' own loop."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.prompts import START_OVER, SUMMARY_REQUEST
from ostinato.tasks.corpus.config import CorpusRequest, DemonstrationConfig, TokenBudgets
from tests.unit.tasks.corpus.test_corpus_stage import build, config_over, read_demonstrations

LIMITS = HarnessConfig(context_tokens=2000, max_generated_tokens=1000, max_turns=12)


def request(problems: Path, code: Path, harness: HarnessConfig, **shares: float) -> CorpusRequest:
    demonstrations = {"count": 6, "wrong_first_share": 0, "give_up_share": 0, "parallel_share": 1}
    config = config_over(
        code,
        [f"def name_{number}(path):\n    return path\n" for number in range(8)],
        TokenBudgets(code=1000, library=1000, repair=1000, repair_general=0),
        DemonstrationConfig.model_validate(demonstrations | shares),
    )
    return CorpusRequest(config=config, problems_directory=str(problems), harness=harness)


def test_after_a_wrong_edit_the_demonstrator_starts_over_in_a_new_context(
    problems_directory: Path, tmp_path: Path
) -> None:
    harness = LIMITS.model_copy(update={"max_restarts": 1})
    asked = request(problems_directory, tmp_path / "code", harness, start_over_share=1.0)
    _, renderer = build(asked, tmp_path / "out")
    texts = read_demonstrations(tmp_path / "out", renderer)
    begun = [(whole, trained) for whole, trained in texts if whole.endswith("did not pass<|end|>")]
    again = [(whole, trained) for whole, trained in texts if f"\n\n{START_OVER} <L" in whole]
    assert begun
    assert len(begun) == len(again)
    for whole, trained in begun:
        wrong = whole[whole.index("<edit_file>") : whole.index("</edit_file>")]
        assert wrong not in trained
        assert trained.endswith("did not pass<|end|>")
    for whole, trained in again:
        assert whole.startswith("<|user|>")
        assert trained.startswith("<run_terminal>pytest</run_terminal><read_file>")
        assert trained.endswith("Fixed.<|end|>")
        assert START_OVER not in trained


def test_past_the_trigger_the_demonstrator_sums_up_the_wrong_line_and_mends_it(
    problems_directory: Path, tmp_path: Path
) -> None:
    harness = LIMITS.model_copy(update={"summarise_at_tokens": 40})
    asked = request(problems_directory, tmp_path / "code", harness)
    _, renderer = build(asked, tmp_path / "out")
    texts = read_demonstrations(tmp_path / "out", renderer)
    looked = [trained for whole, trained in texts if f"{SUMMARY_REQUEST}<|end|>" in whole]
    mended = [trained for whole, trained in texts if "\n\nwrong: <L" in whole]
    assert mended
    assert all("wrong: <L" in trained for trained in looked if "<read_file>" in trained)
    for trained in mended:
        assert trained.startswith("<edit_file><L")
        assert "<read_file>" not in trained


def test_what_cannot_be_demonstrated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="max_restarts is 0, wanted at least 1"):
        request(tmp_path, tmp_path / "a", LIMITS, start_over_share=0.5)
    harness = LIMITS.model_copy(update={"summarise_at_tokens": 100})
    with pytest.raises(ValidationError, match="wanted 0: a demonstrated summary names"):
        request(tmp_path, tmp_path / "b", harness, wrong_first_share=0.5)
