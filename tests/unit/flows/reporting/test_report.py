"""The report: every row and plot that is given is on the page, and text is escaped."""

from pathlib import Path

from ostinato.flows.reporting.report import Curve, ReportRow, write_html

ROW = ReportRow(
    stage="RL", measure="solve rate <b>", before="41.9%", after="49.6%", note="33 steps"
)


def test_write_html_holds_rows_plots_and_facts_escaped(tmp_path: Path) -> None:
    curve = Curve(title="t", x_label="step", y_label="", series={"a": ((1.0, 2.0), (0.1, 0.2))})
    page = write_html(tmp_path / "report.html", "title", [ROW], [curve], {"seed": "1"}).read_text()
    assert "41.9%" in page
    assert "solve rate &lt;b&gt;" in page
    assert page.count("data:image/png;base64,") == 1
