"""A model served elsewhere over an OpenAI-style API: its address, a probe, and a client that retries
while the server is busy.
"""

import asyncio

import httpx2
from pydantic import BaseModel, Field, ValidationError

from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import named_secret

ANSWER_SECONDS = 600.0  # for one answer of a busy server
PROBE_SECONDS = 0.8
TRIES = 4  # per request, while the server limits requests or restarts
LONGEST_PAUSE_SECONDS = 20.0  # pauses count towards an attempt's time limit
TOO_MANY = 429
LISTS_NOTHING = (404, 405, 501)  # answers of servers without a list of models
BUSY = (TOO_MANY, 500, 502, 503, 504, 529)


class ListedModel(BaseModel):
    """An entry of OpenAI's list of models."""

    id: str


class Listing(BaseModel):
    """OpenAI's list of models."""

    data: list[ListedModel]


class Endpoint(Record):
    """A model of an OpenAI-style API. Names the key's environment variable, never the key."""

    url: str = Field(
        pattern=r"^https?://[^\s@?#]+$",
        description="address up to and including /v1, as OpenAI's clients take it; it is stored, so it "
        "must not hold a key",
    )
    model: str = Field(description="name of the model, as the API knows it")
    key_env: str | None = None
    """environment variable that holds the key; None: no key"""

    @property
    def title(self) -> str:
        """Name on scorecards."""
        return f"{self.model} at {self.url} (outside baseline)"

    def headers(self) -> dict[str, str]:
        """The header with the key, if there is one. ConfigError when its variable is empty."""
        if self.key_env is None:
            return {}
        return {"Authorization": f"Bearer {named_secret(self.key_env)}"}


def probe(endpoint: Endpoint) -> None:
    """Raises ConfigError within a second if nothing answers there, or if the key or model is refused."""
    url = f"{endpoint.url.rstrip('/')}/models"
    with boundary(ConfigError, f"{url} does not answer; wanted an OpenAI-style API"):
        response = httpx2.get(url, headers=endpoint.headers(), timeout=PROBE_SECONDS)
    if response.status_code not in (200, *LISTS_NOTHING):
        hint = response.headers.get("location", "")
        if response.status_code in (401, 403):
            hint = f"--key-env names the variable of a key (now {endpoint.key_env or 'none'})"
        raise ConfigError(f"{url} says {response.status_code}, wanted 200; {hint}".rstrip("; "))
    listed = _listed_models(response.content)
    if listed and endpoint.model not in listed:
        raise ConfigError(
            f"--model is {endpoint.model!r}, wanted one that {url} lists: "
            f"{', '.join(sorted(listed))[:500]}"
        )


def open_client(endpoint: Endpoint) -> httpx2.AsyncClient:
    """A client with address and key, for any number of attempts."""
    return httpx2.AsyncClient(
        base_url=endpoint.url,
        headers=endpoint.headers(),
        timeout=ANSWER_SECONDS,
        transport=RetryingTransport(httpx2.AsyncHTTPTransport()),
    )


class RetryingTransport(httpx2.AsyncBaseTransport):
    """Transport that repeats requests while the server is busy, restarting or rate limiting."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The first response with a status outside BUSY, else the last. ConfigError when that is 429, because
        every other attempt would get it too.
        """
        for tries in range(1, TRIES + 1):
            pause_seconds = 0.5 * 2**tries
            try:
                response = await self._inner.handle_async_request(request)
            except httpx2.ConnectError:
                if tries == TRIES:
                    raise
            else:
                if response.status_code not in BUSY:
                    return response
                if tries == TRIES:
                    break
                pause_seconds = _retry_after_seconds(response, pause_seconds)
                await response.aclose()
            await asyncio.sleep(min(pause_seconds, LONGEST_PAUSE_SECONDS))
        if response.status_code == TOO_MANY:
            said = (await response.aread()).decode(errors="replace")[:300]
            raise ConfigError(
                f"{request.url} says {TOO_MANY} {TRIES} times in a row ({said}), wanted an answer; run the "
                "same command later, or with fewer attempts at a time: finished ones are kept"
            )
        return response

    async def aclose(self) -> None:
        """Ends the connections."""
        await self._inner.aclose()


def _retry_after_seconds(response: httpx2.Response, otherwise_seconds: float) -> float:
    """Seconds of the header `Retry-After`, which may also hold a date."""
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isdecimal() else otherwise_seconds


def _listed_models(body: bytes) -> set[str]:
    """Names of OpenAI's list of models. Empty for any other body."""
    try:
        listing = Listing.model_validate_json(body)
    except ValidationError:
        return set()
    return {model.id for model in listing.data}
