"""Values that tests without expectations look at, written down as the tests run. Runs in boxes, with pytest."""

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from typing import Any

from ostinato.infra.sandbox.inside.trials.perturbation import vary_value
from ostinato.infra.sandbox.inside.trials.watched_calls import WatchedCalls
from ostinato.infra.sandbox.inside.value_forms import CallTimeout, describe_text

_MAX_VALUES = 200  # of one test


class Observer:
    """A pytest plugin, and what tests whose expectations were taken out call with their values."""

    def __init__(self, request: dict, file: Any) -> None:
        self._request = request
        self._file = file
        self._test = ""
        self._room = _MAX_VALUES
        self._varying = random.Random()
        self._varied_share = 0.0
        self._has_failed = False
        self._given_up: set[str] = set()  # files
        self._watched: WatchedCalls | None = None
        if request["function"] is not None:
            path, symbol = request["function"]
            self._watched = WatchedCalls(f"{request['root']}/{path}", symbol)
            self._places = [(module, name) for module, name in request["places"]]
            self._watched.install_at_import(self._places)

    def vary(self, value: Any) -> Any:
        """The value, or with the probability given for the test's file another one near it, drawn alike in
        every process. Before the first test always the value itself.
        """
        is_other = self._varied_share > 0 and self._varying.random() < self._varied_share
        return vary_value(value, self._varying) if is_other else value

    def observe(self, *values: Any) -> None:
        """Write values down."""
        self._note("values", [describe_text(value) for value in values])

    @contextlib.contextmanager
    def catch(self, with_text: bool = False) -> Iterator[Any]:
        """Note the type of the exception that a block ends in, perhaps its text, and go on."""
        caught = ExceptionRecord()
        try:
            yield caught
        except Exception as error:  # noqa: BLE001 - code under test raises anything
            caught.value = caught.exception = error
            caught.type = type(error)
        shown = [caught.type.__name__] if caught.type else []
        if shown and with_text:
            shown.append(describe_text(str(caught.value)))
        self._note("caught", shown)

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Keeps the wanted tests, a few instances of a parametrized one, in an order seeded by the host.
        Where the host names the instances of an earlier run (`chosen`), exactly those: pytest's own ids
        of cases that come from a set differ between runs.
        """
        rng = random.Random(self._request["order"])
        chosen = frozenset(self._request["chosen"])
        by_name: dict[str, list] = {}
        for item in items:
            by_name.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = []
        for name in sorted(by_name.keys() & set(self._request["tests"])):
            # sorted by parameters: cases from a set come in an order that addresses decide
            found = list(enumerate(sorted(by_name[name], key=_show_parameters)))
            for position, item in found:
                item.observed_name = f"{name}#{position}"
            named = [pair for pair in found if pair[1].nodeid in self._request["instances"]]
            others = [pair for pair in found if pair not in named]
            most = max(0, self._request["most"] - len(named))
            drawn = [*named, *rng.sample(others, min(len(others), most))]
            if chosen:
                drawn = [pair for pair in found if pair[1].observed_name in chosen]
            kept += [item for _, item in sorted(drawn, key=lambda pair: pair[0])]
        rng.shuffle(kept)
        items[:] = kept
        if self._watched is not None:  # all modules are imported
            places = self._places or self._watched.find_places()
            self._watched.install(places)
            self._tell({"places": places})
            self._tell({"test": "", "facts": sorted(self._watched.facts)})  # of imports

    def pytest_runtest_setup(self, item: Any) -> None:
        """A test begins, unless another of its file took too long."""
        self._test, self._room = item.observed_name, _MAX_VALUES
        self._has_failed = False
        file = self._test.partition("::")[0]
        if file in self._given_up:
            raise TimeoutError
        random.seed(f"{self._request['luck']} {self._test}")
        self._varying = random.Random(f"{self._request['order']} {self._test}")
        self._varied_share = self._request["varied"].get(file, 0.0)
        self._arm()
        if self._watched is not None:
            share = self._request["perturbed"].get(file, 0.0)
            self._watched.begin(f"{self._request['order']} {self._test}", share)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """A part of a test ended: setup, a subtest, the test itself, teardown."""
        if call.excinfo is None:
            return
        self._has_failed = True
        self._add("ended", call.excinfo.type.__name__)
        if call.excinfo.type is CallTimeout:
            item.failfast = True  # else unittest goes on with the next subtest
            self._arm()
            if self._test in self._request["timely"]:
                self._given_up.add(self._test.partition("::")[0])

    def pytest_runtest_teardown(self) -> None:
        """A test ended, with all its subtests."""
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if not self._has_failed:
            self._add("ended", "")
        if self._watched is not None:
            self._tell({"test": self._test, "facts": sorted(self._watched.facts)})

    def pytest_sessionfinish(self) -> None:
        """All tests ended."""
        watched = self._watched
        seconds, calls = (watched.median_seconds, watched.calls) if watched else (0.0, [])
        self._tell({"seconds": seconds, "calls": calls})

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, self._request["test_seconds"])

    def _add(self, kind: str, content: Any) -> None:
        """Notes an entry that does not count towards _MAX_VALUES."""
        self._room += 1
        self._note(kind, content)

    def _note(self, kind: str, content: Any) -> None:
        if self._room > 0:
            self._room -= 1
            self._tell({"test": self._test, kind: content})

    def _tell(self, line: dict) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _show_parameters(item: Any) -> str:
    """The parameters of an instance of a test as text."""
    held = vars(item).get("callspec")
    return "" if held is None else json.dumps([describe_text(it) for it in held.params.values()])


class ExceptionRecord:
    """Stand-in for the exception information of pytest.raises and of assertRaises."""

    value: Any = None
    exception: Any = None
    type: Any = None

    def match(self, *_: Any) -> bool:
        """Always true: the text is an expectation."""
        return True
