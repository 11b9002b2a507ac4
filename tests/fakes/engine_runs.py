"""Runs of an embedded engine until every request is answered."""

from collections.abc import AsyncIterable, Sequence

from ostinato.models.decode.engine import DecodeEngine
from ostinato.models.decode.protocol import GenerateRequest, Generation


def run(engine: DecodeEngine, requests: Sequence[GenerateRequest]) -> dict[str, Generation]:
    """The answers by request id, those to requests submitted before included."""
    for request in requests:
        engine.submit(request)
    finished = {}
    while engine.has_work:
        finished |= {generation.request_id: generation for generation in engine.step()}
    return finished


def run_in_order(engine: DecodeEngine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    """The answers, one for each request."""
    finished = run(engine, requests)
    return [finished[request.request_id] for request in requests]


async def read_some(stream: AsyncIterable[Sequence[int]], least: int) -> list[int]:
    """The first tokens of a stream, at least so many; then nobody reads on."""
    read: list[int] = []
    async for tokens in stream:
        read += tokens
        if len(read) >= least:
            break
    return read
