"""Attempts as files: a page that shows what was stored, ATIF that Harbor reads, parquet that keeps all."""

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from pyarrow import parquet

from ostinato.flows.reporting.attempt_files import MAX_SHOWN, count_same_turns, group_page, save
from ostinato.flows.reporting.attempts import Attempt, describe
from ostinato.infra.agent.transcript import CallStatus, Segment, ToolCallRecord, TurnRecord
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.sandbox.egress.config import NetworkRequest
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory

SCHEMA = Path(__file__).parents[3] / "fakes" / "atif_v1_8.schema.json"
HOSTILE = "</pre><script>alert(1)</script>"
DIFF = "--- a/code.py\n+++ b/code.py\n@@ -2 +2 @@\n-    return 2\n+    return '<b>'"
LOGPROBS = (-0.5, -2.5, -50.0)  # of the first answer's two tokens and of the second's one


def make_segment() -> Segment:
    """Two answers in one sequence: the second after the results of the first's calls."""
    mask = np.array([False, False, True, True, False, True])
    logprobs = np.zeros(6, dtype=np.float32)
    logprobs[mask] = LOGPROBS
    versions = np.where(mask, 4, -1)
    return Segment(
        token_ids_T=np.arange(6, dtype=np.int32),
        loss_mask_T=mask,
        logprobs_T=logprobs,
        weight_versions_T=versions,
        cache_versions_T=versions,
        routed_experts_TLK=np.zeros((6, 1, 1), dtype=np.int16),
    )


def make_attempt(name: str = "run-1.g0.t0", *, num_tokens: int = 2) -> Attempt:
    call = ToolCallRecord(
        tool="read_file", arguments={"path": HOSTILE}, status=CallStatus.OK, wall_seconds=0.1
    )
    turns = (
        TurnRecord(
            generated_tokens=num_tokens,
            text="I read both.",
            calls=(call, call),
            results=(HOSTILE, "def two():"),
        ),
        TurnRecord(generated_tokens=1, text="Fixed.", calls=()),
    )
    plain = make_trajectory(AttemptRequest(name, "run-1.g0", make_problem("p"), 0, 0, 0))
    facts = plain.model_dump(mode="json", exclude={"transcript": {"segments"}})
    facts["transcript"]["turns"] = [turn.model_dump(mode="json") for turn in turns]
    facts |= {"prompt": HOSTILE, "changed_files": {"code.py": DIFF}}
    return Attempt(facts, (make_segment(),), ("a", HOSTILE, "b", "c", "d", "e"))


class Page(HTMLParser):
    """Texts of the elements of each class, sampled tokens with their styles, elements that are open."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.styles: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("meta", "br"):
            return
        named = dict(attrs)
        self._open.append(named.get("class") or "")
        self.texts.setdefault(self._open[-1], []).append("")
        if named.get("class") == "sampled":
            self.styles.append(named["style"] or "")

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for name in {*self._open}:
            self.texts[name][-1] += data


def test_page_shows_prompt_calls_results_diff_verdict_reward_and_tokens(tmp_path: Path) -> None:
    page = Page(save(tmp_path / "page.html", "a group", [make_attempt()]))
    assert page.texts["prompt"] == [HOSTILE]
    assert page.texts["answer"] == ["I read both.", "Fixed."]
    assert page.texts["result"] == [HOSTILE, "def two():"]
    assert page.texts["added"] == ["+    return '<b>'"]
    assert page.texts["removed"] == ["-    return 2"]
    assert "1 of 1 tests" in page.texts["verdict"][0]
    assert page.texts["terms"] == ["solved +1.000"]
    assert page.texts["tokens"] == [f"a{HOSTILE}bcde"]
    assert page.texts["sampled"] == ["b", "c", "e"]
    assert [style[-5:-1] for style in page.styles] == ["0.10", "0.50", "1.00"]


def test_page_text_and_files_show_the_requests_to_the_network(tmp_path: Path) -> None:
    attempt = make_attempt()
    assert "network" not in Page(save(tmp_path / "closed.html", "t", [attempt])).texts
    asked = NetworkRequest(
        at=0.0, method="CONNECT", host="files.test:443", path="", sent_bytes=7, received_bytes=0,
        allowed=False, reason=HOSTILE,
    )  # fmt: skip
    attempt.facts["network"] = [asked.model_dump(mode="json")]
    line = f"refused: CONNECT files.test:443 : 7 bytes sent, 0 received: {HOSTILE}"
    assert Page(save(tmp_path / "open.html", "t", [attempt])).texts["network"] == [line]
    assert line in list(describe([attempt]))
    row = parquet.read_table(save(tmp_path / "all.parquet", "t", [attempt])).to_pylist()[0]
    assert json.loads(row["network"])[0]["host"] == "files.test:443"


def test_page_runs_nothing_of_what_a_model_wrote(tmp_path: Path) -> None:
    page = Page(save(tmp_path / "page.html", HOSTILE, [make_attempt()]))
    assert page.tags.count("script") == 1  # which opens the attempt that the address names


def test_page_draws_branches_and_shows_replies_to_turns_without_calls(tmp_path: Path) -> None:
    attempt = make_attempt()
    assert "branches" not in Page(save(tmp_path / "one.html", "t", [attempt])).texts
    turns = [
        TurnRecord(generated_tokens=1, text=text, calls=(), results=results, continues=continues)
        for text, results, continues in (
            ("a", (HOSTILE,), None), ("b", ("empty", "patch"), None), ("c", (), 0)
        )
    ]  # fmt: skip
    attempt.facts["transcript"]["turns"] = [turn.model_dump(mode="json") for turn in turns]
    page = Page(save(tmp_path / "page.html", "t", [attempt]))
    assert page.texts["branches"] == [" 1 -  2\n 1 -  3"]
    assert page.texts["result"] == [HOSTILE, "empty", "patch"]
    assert page.texts["call"] == ["Reply"] * 3


def test_page_of_many_shows_the_newest_whole_and_lists_the_others(tmp_path: Path) -> None:
    attempts = [make_attempt(f"t{number}") for number in range(MAX_SHOWN + 2)]
    page = Page(save(tmp_path / "page.html", "a run", attempts))
    assert len(page.texts["prompt"]) == MAX_SHOWN
    text = (tmp_path / "page.html").read_text()
    assert "t1  finished, reward +1.000" in text
    assert 'id="t1"' not in text
    assert f'id="t{MAX_SHOWN + 1}"' in text


def test_attempt_without_a_record_has_a_page(tmp_path: Path) -> None:
    journal = {
        "trajectory_id": "t0",
        "group_id": "g0",
        "prompt": None,
        "state": "reserved",
        "outcome": None,
        "reward": None,
        "trained_step": None,
        "weight_version": 0,
    }
    text = save(tmp_path / "page.html", "a run", [Attempt(journal)]).read_text()
    assert "No more of it was stored" in text
    with pytest.raises(ConfigError, match="none of the 1 attempts"):
        save(tmp_path / "atif", "a run", [Attempt(journal)])


def test_atif_keeps_to_harbors_schema_and_holds_tokens_of_each_answer(tmp_path: Path) -> None:
    folder = save(tmp_path / "atif", "run-1.g0", [make_attempt("t0"), make_attempt("t1")])
    documents = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    for document in documents:
        validator.validate(document)
    first = documents[0]
    assert [one["trajectory_id"] for one in documents] == ["t0", "t1"]
    # laws of Harbor's model that its schema does not state
    assert [step["step_id"] for step in first["steps"]] == [1, 2, 3]
    step = first["steps"][1]
    ids = [call["tool_call_id"] for call in step["tool_calls"]]
    assert len(set(ids)) == 2
    assert [one["source_call_id"] for one in step["observation"]["results"]] == ids
    found = [step["metrics"] for step in first["steps"][1:]]
    assert [one["completion_token_ids"] for one in found] == [[2, 3], [5]]
    assert [value for one in found for value in one["logprobs"]] == list(LOGPROBS)
    assert [one["prompt_tokens"] for one in found] == [2, 5]


def test_atif_leaves_tokens_out_where_turns_and_sequences_disagree(tmp_path: Path) -> None:
    folder = save(tmp_path / "atif", "t0", [make_attempt("t0", num_tokens=3)])
    document = json.loads((folder / "t0.json").read_text())
    assert [step["metrics"] for step in document["steps"][1:]] == [
        {"completion_tokens": 3},
        {"completion_tokens": 1},
    ]


def test_parquet_holds_a_row_for_each_attempt_with_its_tokens(tmp_path: Path) -> None:
    attempt = make_attempt()
    journal = Attempt({"trajectory_id": "t1", "group_id": "g1", "prompt": None, "reward": 0.5})
    rows = parquet.read_table(
        save(tmp_path / "rows.parquet", "a run", [attempt, journal])
    ).to_pylist()
    assert [row["trajectory_id"] for row in rows] == ["run-1.g0.t0", "t1"]
    assert [(row["passed"], row["reward_total"]) for row in rows] == [(True, 1.0), (None, 0.5)]
    assert json.loads(rows[0]["transcript"]) == attempt.facts["transcript"]
    [segment] = rows[0]["segments"]
    assert segment["token_ids"] == list(range(6))
    assert segment["logprobs"] == make_segment().logprobs_T.tolist()
    assert rows[1]["segments"] == []


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attempts.csv, wanted NAME.html, NAME.parquet"):
        save(tmp_path / "attempts.csv", "t0", [make_attempt()])


def test_a_group_is_the_same_up_to_the_first_turn_that_differs() -> None:
    look, edit, give_up = ({"text": text, "results": ()} for text in ("look", "edit", "give up"))
    assert count_same_turns([[look, edit], [look, give_up], [look]]) == 1
    assert count_same_turns([[look, edit], [look, edit]]) == 2
    assert count_same_turns([[look], [edit]]) == 0
    assert count_same_turns([[look, {**edit, "results": ("a",)}], [look, edit]]) == 1
    assert count_same_turns([[look]]) == count_same_turns([]) == 0


def test_a_page_of_a_group_shows_what_models_wrote_as_text() -> None:
    page = group_page(HOSTILE, [make_attempt("run-1.g0.t0"), make_attempt("run-1.g0.t1")])
    assert "<script>" not in page
    assert page.count("run-1.g0.t1") == 2  # the link and its text
    assert "differ from turn 3 on" in page
