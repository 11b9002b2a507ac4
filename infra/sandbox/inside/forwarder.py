"""Forwards a port of the box's own loopback to a server behind a Unix socket.

Standard library only: this file runs inside the box, as `python3 forwarder.py SOCKET PORT COMMAND`. It listens, runs
the command with a shell, and ends with its exit code. Bytes are forwarded unchanged in both directions.
"""

import asyncio
import contextlib
import sys

_PIECE_BYTES = 1 << 16


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes until the reader ends or either connection breaks."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


async def _connect(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves one connection. When either side ends, the other is closed."""
    try:
        far_reader, far_writer = await asyncio.open_unix_connection(path)
    except OSError:
        writer.close()
        return
    back = asyncio.ensure_future(_copy(far_reader, writer))
    there = asyncio.ensure_future(_copy(reader, far_writer))
    # The first side to end ends both, so that a server learns at once that its client is gone.
    await asyncio.wait((back, there), return_when=asyncio.FIRST_COMPLETED)
    for task in (back, there):
        task.cancel()
    await asyncio.gather(back, there, return_exceptions=True)
    for end in (writer, far_writer):
        end.close()


async def run(path: str, port: int, command: str) -> int:
    """Runs the command and returns its exit code, in a shell's convention (128 + signal)."""
    server = await asyncio.start_server(
        lambda reader, writer: _connect(path, reader, writer), "127.0.0.1", port
    )
    async with server:
        process = await asyncio.create_subprocess_shell(command)
        code = await process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
