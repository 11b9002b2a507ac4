"""A client that does everything to be in others' way, until it is ended. Arguments: host, port."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from itertools import count

Address = tuple[str, int]
Habit = Callable[[Address], Awaitable[None]]

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key}\r\n"
CHAT = {"model": "ostinato", "stream": True, "max_tokens": 64}


async def send(address: Address, data: bytes, *, read: bool = True) -> None:
    """Sends bytes and waits for the end of the answer, or leaves at once."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(data)
        await writer.drain()
        if read:
            await reader.read()
    finally:
        writer.close()


def request(body: bytes, key: str = "key-of-rude", more: str = "") -> bytes:
    head = HEAD.format(key=key) + f"Content-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    return head.encode() + body


def chat(text: str) -> bytes:
    return json.dumps(CHAT | {"messages": [{"role": "user", "content": text}]}).encode()


async def too_large(address: Address) -> None:
    await send(address, request(b" " * (40 << 20)))


async def endless_chunks(address: Address) -> None:
    head = HEAD.format(key="key-of-rude") + "Transfer-Encoding: chunked\r\n\r\n"
    await send(address, head.encode() + (b"10000\r\n" + b"x" * 65_536 + b"\r\n") * 100)


async def deep(address: Address) -> None:
    await send(address, request(b"[" * 2_000_000))


async def long_text(address: Address) -> None:
    await send(address, request(chat("word " * 700_000)))


async def just_below_the_limit(address: Address) -> None:
    await send(address, request(chat("fix " * 1_000)))


async def unknown_key(address: Address) -> None:
    await send(address, request(chat("hello"), key="guess"))


async def leaves_at_once(address: Address) -> None:
    await send(address, request(chat("Fix first")), read=False)
    await asyncio.sleep(0.02)  # a flood of connections is stopped before it reaches a server


async def never_reads(address: Address) -> None:
    _, writer = await asyncio.open_connection(*address)
    writer.write(request(chat("Fix first")))
    await asyncio.sleep(5)
    writer.transport.abort()


async def one_byte_a_second(address: Address) -> None:
    _, writer = await asyncio.open_connection(*address)
    try:
        for byte in HEAD.encode():
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(1)
    finally:
        writer.close()


HABITS: dict[Habit, int] = {  # habit -> how many at once
    too_large: 1,
    endless_chunks: 1,
    deep: 1,
    long_text: 1,
    just_below_the_limit: 2,
    unknown_key: 2,
    leaves_at_once: 2,
    never_reads: 20,
    one_byte_a_second: 100,
}


async def main(host: str, port: int) -> None:
    async def again(habit: Habit) -> None:
        for _ in count():
            try:
                await habit((host, port))
            except OSError:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(again(habit) for habit, number in HABITS.items() for _ in range(number)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
