"""The report: every row and plot that is given is on the page, and text is escaped."""

import io
from pathlib import Path

from rich.console import Console

from ostinato.flows.recipe import load_recipe
from ostinato.flows.reporting.run_report import (
    RunReport,
    StageTime,
    describe_origin,
    print_report,
    write_page,
)
from ostinato.flows.reporting.tables import ReportRow
from ostinato.flows.stages.curves import Curve, evaluation_curves, plot_png
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.records import Metric
from ostinato.tasks.reinforcement.records import EvaluationPoint

ROW = ReportRow(
    stage="RL", measure="solve rate <b>", before="41.9%", after="49.6%", note="33 steps"
)
TIME = StageTime("corpus/toy@1", "2026-01-02 03:04:05", "37")


def test_page_holds_rows_plots_and_facts_escaped(tmp_path: Path) -> None:
    curve = Curve(
        key="t",
        title="t",
        expected="It <rises>.",
        x_label="step",
        y_label="",
        series={"a": ((1.0, 2.0), (0.1, 0.2))},
    )
    links = {"the best attempt": "attempts.html#t1"}
    headline = ROW._replace(measure="the headline")
    controls = [ROW._replace(measure="control: start")]
    cycle = ROW._replace(stage="cycle")
    facts = {"seed": "1"}
    made = RunReport(
        "title", headline, controls, [curve], [ROW], [cycle], links, [TIME], facts, "c@1"
    )
    path = write_page(tmp_path / "report.html", made)
    page = path.read_text()
    assert '<a href="attempts.html#t1">the best attempt</a>' in page
    places = [
        "the headline: 41.9% &rarr; 49.6%",
        "control: start",
        "base64",
        "solve rate &lt;b&gt;",
    ]
    found = [page.index(text) for text in places]
    assert found == sorted(found)
    assert 'alt="t. It &lt;rises&gt;."' in page
    assert "<figcaption>When things go well: It &lt;rises&gt;.</figcaption>" in page
    assert "ostinato run controls" not in page
    assert page.count("data:image/png;base64,") == 1
    assert "<td>cycle</td>" in page
    assert "<td>corpus/toy@1</td><td>2026-01-02 03:04:05</td><td>37</td>" in page


def test_report_without_controls_says_how_to_make_them(tmp_path: Path) -> None:
    report = RunReport("title", ROW, [], [], [ROW], [], {}, [], {}, "c@1")
    path = write_page(tmp_path / "report.html", report)
    assert "<code>ostinato run controls</code>" in path.read_text()


def test_prefect_has_all_rows_and_the_console_the_headline_and_what_to_do_next(
    tmp_path: Path,
) -> None:
    controls = [ROW._replace(measure=f"control: {name}") for name in "ab"]
    pretraining = ROW._replace(stage="pretraining", measure="a new name", key="perplexity")
    cycle = ROW._replace(stage="cycle", measure="samples", before="", key="cycle")
    rows = [ROW, pretraining, *[ROW._replace(measure=f"{at}") for at in range(20)]]
    report = RunReport(
        "title", ROW, controls, [], rows, [cycle], {}, [], {}, checkpoint="reinforced/toy@1"
    )
    shown = ("stage", "measure", "before", "after", "note")
    wanted = [{name: one._asdict()[name] for name in shown} for one in (*rows, *controls, cycle)]
    assert report.table == wanted
    text = io.StringIO()
    page = tmp_path / "report.html"
    print_report(report, page, Console(file=text, width=40))
    assert text.getvalue().splitlines() == [
        "title",
        "",
        "RL, solve rate <b>: 41.9% -> 49.6%",
        "",
        "control: a: 41.9%, RL 49.6%",
        "control: b: 41.9%, RL 49.6%",
        "pretraining, a new name: 41.9% -> 49.6%",
        "cycle, samples: 49.6%",
        "",
        f"report with all rows and plots: {page}",
        "every plot and attempt: ostinato dashboard",
        "talk to it in a repository: ostinato chat --repo PATH",
        "keep it: ostinato export reinforced/toy@1 DIRECTORY",
    ]


def test_origin_names_machine_commit_and_what_was_changed_in_the_recipe(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, cpu_limit=2)
    plain = load_recipe("nano", seed=3)
    changed = load_recipe("nano", seed=3, overrides=["learning.optimizer.learning_rate=1e-9"])
    assert describe_origin(plain, settings)["changes to the shipped recipe"] == "none"
    facts = describe_origin(changed, settings)
    before = plain.learning.optimizer.learning_rate
    assert facts["changes to the shipped recipe"] == (
        f"learning.optimizer.learning_rate: {before} -> 1e-09"
    )
    assert "2 cores" in facts["machine"]
    assert facts["code"].startswith("ostinato ")


def test_evaluation_curve_holds_what_was_measured_with_its_interval() -> None:
    rate = Metric(mean=0.4, low=0.3, high=0.5, count=8)
    best = Metric(mean=0.6, low=0.5, high=0.7, count=8)

    def point(step: int, average: Metric | None, best_of: Metric | None) -> EvaluationPoint:
        return EvaluationPoint(
            step=step, weight_version=step, attempts_per_problem=4, average=average, best_of=best_of
        )

    [curve] = evaluation_curves([point(0, rate, best), point(2, None, None), point(4, best, best)])
    assert curve.series["average"] == ((0.0, 4.0), (0.4, 0.6))
    assert curve.intervals["average"] == ((0.3, 0.5), (0.5, 0.7))
    assert curve.series["best of 4"][1] == (0.6, 0.6)
    assert plot_png(curve) != plot_png(curve.model_copy(update={"intervals": {}}))
    assert evaluation_curves([point(0, None, None)]) == []
