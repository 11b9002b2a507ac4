"""Recording of the values that tests without expectations observe. Runs in boxes, with pytest."""

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from typing import Any

from ostinato.infra.sandbox.inside.sources import function_of
from ostinato.infra.sandbox.inside.trials.perturbation import vary_value
from ostinato.infra.sandbox.inside.trials.repeated_calls import KeptCalls
from ostinato.infra.sandbox.inside.trials.watched_calls import WatchedCalls
from ostinato.infra.sandbox.inside.value_forms import CallTimeout, describe_text

_MAX_VALUES = 200  # per test


class Observer:
    """A pytest plugin, with the functions that tests call with their values in place of expectations."""

    def __init__(self, request: dict, file: Any) -> None:
        self._request = request
        self._file = file
        self._test = ""
        self._remaining = _MAX_VALUES
        self._varying = random.Random()
        self._varied_share = 0.0
        self._has_failed = False
        self._abandoned: set[str] = set()  # files of which a test took too long
        self._watched: WatchedCalls | None = None
        if request["function"] is not None:
            path, symbol = request["function"]
            kept = KeptCalls(request["repeated"], request["copied"])
            place = f"{request['root']}/{path}"
            self._watched = WatchedCalls(place, symbol, kept, request["worn"])
            self._places = [(module, name) for module, name in request["places"]]
            self._watched.install_at_import(self._places)

    def vary(self, value: Any) -> Any:
        """The value, or with the probability that the request gives for the test's file a value near it. Every
        process draws the same ones. Before the first test, it is always the value itself.
        """
        is_other = self._varied_share > 0 and self._varying.random() < self._varied_share
        return vary_value(value, self._varying) if is_other else value

    def observe(self, *values: Any) -> None:
        """Writes the forms of values."""
        self._note("values", [describe_text(value) for value in values])

    @contextlib.contextmanager
    def catch(self, with_text: bool = False) -> Iterator[Any]:
        """Suppresses an exception that ends the block, and notes its type, with `with_text` also its text."""
        caught = ExceptionRecord()
        try:
            yield caught
        except Exception as error:  # noqa: BLE001 - code under test may raise anything
            caught.value = caught.exception = error
            caught.type = type(error)
        shown = [caught.type.__name__] if caught.type else []
        if shown and with_text:
            shown.append(describe_text(str(caught.value)))
        self._note("caught", shown)

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Keeps the requested tests, with a few instances of each parametrized one, in an order seeded by the host.
        If the host names instances of an earlier run (`chosen`), exactly those are kept. They have names of their
        own, because pytest's ids of cases from a set differ between runs.
        """
        rng = random.Random(self._request["order"])
        chosen = frozenset(self._request["chosen"])
        by_name: dict[str, list] = {}
        for item in items:
            by_name.setdefault(function_of(item.nodeid), []).append(item)
        kept = []
        for name in sorted(by_name.keys() & set(self._request["tests"])):
            # Sorted by parameters, because the order of cases from a set depends on addresses.
            found = list(enumerate(sorted(by_name[name], key=_show_parameters)))
            for position, item in found:
                item.observed_name = f"{name}#{position}"
            named = [pair for pair in found if pair[1].nodeid in self._request["instances"]]
            others = [pair for pair in found if pair not in named]
            num_drawn = max(0, self._request["most"] - len(named))
            drawn = [*named, *rng.sample(others, min(len(others), num_drawn))]
            if chosen:
                drawn = [pair for pair in found if pair[1].observed_name in chosen]
            kept += [item for _, item in sorted(drawn, key=lambda pair: pair[0])]
        rng.shuffle(kept)
        items[:] = kept
        if self._watched is not None:  # all modules are imported by this time
            places = self._places or self._watched.find_places()
            self._watched.install(places)
            self._write({"places": places})
            self._write({"test": "", "facts": sorted(self._watched.facts)})  # facts of the imports

    def pytest_runtest_setup(self, item: Any) -> None:
        """Starts a test, unless another test of its file took too long."""
        self._test, self._remaining = item.observed_name, _MAX_VALUES
        self._has_failed = False
        file = self._test.partition("::")[0]
        if file in self._abandoned:
            raise TimeoutError
        random.seed(f"{self._request['luck']} {self._test}")
        self._varying = random.Random(f"{self._request['order']} {self._test}")
        self._varied_share = self._request["varied"].get(file, 0.0)
        self._arm()
        if self._watched is not None:
            share = self._request["perturbed"].get(file, 0.0)
            self._watched.begin(f"{self._request['order']} {self._test}", share)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Notes the exception of a phase of a test: setup, a subtest, the test itself or teardown."""
        if call.excinfo is None:
            return
        self._has_failed = True
        self._add("ended", call.excinfo.type.__name__)
        if call.excinfo.type is CallTimeout:
            item.failfast = True  # otherwise unittest continues with the next subtest
            self._arm()
            if self._test in self._request["timely"]:
                self._abandoned.add(self._test.partition("::")[0])

    def pytest_runtest_teardown(self) -> None:
        """Writes the end and the facts of a test, after all its subtests."""
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if not self._has_failed:
            self._add("ended", "")
        if self._watched is not None:
            self._write({"test": self._test, "facts": sorted(self._watched.facts)})

    def pytest_sessionfinish(self) -> None:
        """Writes the calls and timing of all tests, and the measurements of a repeated call."""
        watched = self._watched
        seconds, calls = (watched.median_seconds, watched.calls) if watched else (0.0, [])
        copied = watched.copied if watched else []
        self._write({"seconds": seconds, "calls": calls, "copied": copied})
        # if tests make calls with plain data, drawn calls are repeated instead
        is_repeated = self._request["repeated"] or (not calls and not self._request["worn"])
        if watched and is_repeated:
            self._write({"repeated": watched.repeat(self._request["repeats"])})

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, self._request["test_seconds"])

    def _add(self, kind: str, content: Any) -> None:
        """Notes an entry that does not count towards _MAX_VALUES."""
        self._remaining += 1
        self._note(kind, content)

    def _note(self, kind: str, content: Any) -> None:
        if self._remaining > 0:
            self._remaining -= 1
            self._write({"test": self._test, kind: content})

    def _write(self, line: dict) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _show_parameters(item: Any) -> str:
    """The parameters of an instance of a test, as text."""
    spec = vars(item).get("callspec")
    return "" if spec is None else json.dumps([describe_text(it) for it in spec.params.values()])


class ExceptionRecord:
    """Stand-in for the exception information of pytest.raises and of assertRaises."""

    value: Any = None
    exception: Any = None
    type: Any = None

    def match(self, *_: Any) -> bool:
        """Always true, because the text of an exception is an expectation."""
        return True
