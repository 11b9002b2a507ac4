"""A gate's picture: drawn from means with intervals, and no reason to end a flow where it cannot be."""

import pytest

from ostinato.flows.reporting import evaluations
from ostinato.flows.reporting.evaluations import gate_png, show_gate
from ostinato.tasks.records import Metric

RATE = Metric(mean=0.4, low=0.3, high=0.5, count=8)


def test_picture_shows_means_with_intervals_and_says_what_was_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[tuple[bytes, str]] = []
    monkeypatch.setattr(
        evaluations, "show_image", lambda png, key, description: shown.append((png, description))
    )
    rates = {"candidate": RATE, "champion": RATE}
    show_gate(rates, "Gate passed: no worse")
    assert shown[0][0].startswith(b"\x89PNG")
    assert shown[0][1].startswith("Gate passed: no worse. The candidate's interval is level")
    wider = {**rates, "candidate": RATE.model_copy(update={"high": 0.9})}
    assert gate_png(wider) != gate_png(rates)
    show_gate({"candidate": RATE.model_copy(update={"low": object()})}, "Gate failed")
    assert len(shown) == 1
