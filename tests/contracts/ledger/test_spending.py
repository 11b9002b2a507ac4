"""Tokens of accounts by day: added once each, by several gateways at a time."""

from concurrent.futures import ThreadPoolExecutor

from ostinato.infra.platform.ledger import Ledger


def test_counts_of_several_gateways_add_up_and_days_are_apart(ledger: Ledger) -> None:
    assert ledger.spending.add({}, 7) == {}
    assert ledger.spending.add({(7, "acme"): 5, (6, "acme"): 1, (7, "zoo"): 2}, 7) == {
        "acme": 5,
        "zoo": 2,
    }
    others = [Ledger(ledger.database.engine.url.render_as_string(hide_password=False))] * 4
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda one: one.spending.add({(7, "acme"): 1}, 7), others * 5))
    assert ledger.spending.add({}, 7) == {"acme": 25, "zoo": 2}
    assert ledger.spending.add({}, 6) == {"acme": 1}
    others[0].close()
