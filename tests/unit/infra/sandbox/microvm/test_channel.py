"""Laws of the moments when nothing travels to a machine, with a guest that answers at once."""

import asyncio
import os
import socket

from ostinato.infra.platform.errors import SandboxError, SandboxLost
from ostinato.infra.sandbox.inside.wire import FrameDecoder, encode_frame
from ostinato.infra.sandbox.microvm.channel import MachineChannel


class AnsweringGuest:
    """A machine whose guest answers every request, and keeps the requests' names."""

    name = "answering"

    def __init__(self) -> None:
        self.socket, self._guest_end = socket.socketpair()
        self._guest_end.setblocking(False)
        self.information_pipe = os.eventfd(1)
        self.asked: list[str] = []

    async def answer(self) -> None:
        loop, decoder = asyncio.get_running_loop(), FrameDecoder()
        while data := await loop.sock_recv(self._guest_end, 1 << 16):
            for header, _ in decoder.feed(data):
                self.asked.append(header["operation"])
                await loop.sock_sendall(self._guest_end, encode_frame({"id": header["id"]}, ()))

    def admit(self) -> None: ...

    def explain_death(self) -> SandboxError:
        return SandboxLost("closed")

    def kill(self) -> None: ...

    async def end(self) -> None:
        os.close(self.information_pipe)
        self.socket.close()
        self._guest_end.close()


async def test_holds_at_once_follow_one_another_and_no_request_is_sent_in_them():
    guest = AnsweringGuest()
    channel = MachineChannel(guest)  # pyright: ignore[reportArgumentType]
    answering = asyncio.create_task(guest.answer())
    most = holders = 0

    async def hold() -> None:
        nonlocal most, holders
        async with channel.held():
            holders += 1
            most = max(most, holders)
            await asyncio.sleep(0.02)
            holders -= 1

    holds = [asyncio.create_task(hold()) for _ in range(3)]
    await asyncio.sleep(0)  # the first hold has begun
    await asyncio.gather(*holds, *(channel.request("exec", 10.0) for _ in range(2)))
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    await channel.close()
    assert most == 1
    for before, after in zip(guest.asked, guest.asked[1:], strict=False):
        assert before != "hold" or after == "refresh", guest.asked
