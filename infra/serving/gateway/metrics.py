"""Prometheus metrics of a gateway: requests by route, and usage by tenant.

`Metrics` writes the page; `CountRequests` is the ASGI middleware that counts requests for it.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METRICS_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_METHODS = frozenset({"GET", "POST", "DELETE"})  # others share a label: callers can invent names
_LATENCY_BUCKETS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """All metrics of one gateway, in their own registry."""

    def __init__(
        self, counters: Mapping[str, Mapping[str, int]], count_sessions: Callable[[], int]
    ) -> None:
        self._counters = counters
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "ostinato_requests",
            "Requests answered.",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "ostinato_request_seconds",
            "Seconds from a request's head to the end of its answer.",
            ("route",),
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        self.open_requests = Gauge(
            "ostinato_open_requests", "Requests under way.", registry=self._registry
        )
        sessions = Gauge("ostinato_agent_sessions", "Open agent sessions.", registry=self._registry)
        sessions.set_function(count_sessions)
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Counters of tenants. prometheus_client calls this when it writes the page."""
        family = CounterMetricFamily(
            "ostinato_tenant_events",
            "Interactions, tokens, feedback and refusals, by tenant.",
            labels=("tenant", "event"),
        )
        for tenant, counts in list(self._counters.items()):
            for event, count in list(counts.items()):
                family.add_metric((tenant, event), count)
        yield family

    def text(self) -> bytes:
        """The page, in Prometheus's text format."""
        return generate_latest(self._registry)


class CountRequests:
    """Middleware that counts answers by route and status, and times them."""

    def __init__(self, app: ASGIApp, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._app, self._metrics, self._clock = app, metrics, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on. Unknown paths share the route `other`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = self._clock()
        status = 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._metrics.open_requests.track_inprogress():
            try:
                await self._app(scope, receive, note_status)
            finally:
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._metrics.requests.labels(route, method, str(status)).inc()
                self._metrics.seconds.labels(route).observe(self._clock() - started)
