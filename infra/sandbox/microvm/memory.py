"""The private memory of a running machine, read and written from outside it.

It needs the right to trace the machine's process, which its parent has unless the host forbids it,
and works only on a stopped machine.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy

from ostinato.infra.platform.errors import SandboxError

PAGE_BYTES = 4096
_PRESENT = numpy.uint64(1 << 63)
_SWAPPED = numpy.uint64(1 << 62)
_SHARED_OR_FILE = numpy.uint64(1 << 61)
_MAX_RUN_PAGES = 1024


@dataclass(frozen=True, slots=True)
class DirtyPages:
    """Pages of a guest by number, and what they hold."""

    numbers: numpy.ndarray  # int64, rising
    content: bytearray


def read_dirty_pages(process_id: int, memory_file: Path) -> DirtyPages:
    """The pages a stopped machine has written since it mapped the file privately."""
    ranges = _find_mappings(process_id, memory_file)
    parts, runs = [], []
    with Path(f"/proc/{process_id}/pagemap").open("rb", buffering=0) as pagemap:
        for start, end, offset in ranges:
            count = (end - start) // PAGE_BYTES
            raw = os.pread(pagemap.fileno(), 8 * count, start // PAGE_BYTES * 8)
            flags = numpy.frombuffer(raw, dtype="<u8")
            private = (flags & (_PRESENT | _SWAPPED) != 0) & (flags & _SHARED_OR_FILE == 0)
            found = numpy.flatnonzero(private)
            parts.append(found + offset // PAGE_BYTES)
            runs += [(start + first * PAGE_BYTES, count) for first, count in _split_runs(found)]
    numbers = numpy.concatenate(parts) if parts else numpy.empty(0, dtype="<i8")
    content = bytearray(len(numbers) * PAGE_BYTES)
    view, place = memoryview(content), 0
    with Path(f"/proc/{process_id}/mem").open("rb", buffering=0) as memory:
        for address, count in runs:
            wanted = count * PAGE_BYTES
            got = os.preadv(memory.fileno(), [view[place : place + wanted]], address)
            if got != wanted:
                raise SandboxError(
                    f"process {process_id}: read {got} of {wanted} bytes at {address:#x}"
                )
            place += wanted
    order = numpy.argsort(numbers, kind="stable")
    if not numpy.array_equal(order, numpy.arange(len(order))):
        raise SandboxError(f"process {process_id}: guest memory is mapped out of order")
    return DirtyPages(numbers, content)


def write_pages(process_id: int, memory_file: Path, pages: DirtyPages) -> None:
    """Lay pages over the private mapping of a machine that has not run yet."""
    ranges = _find_mappings(process_id, memory_file)
    view = memoryview(pages.content)
    with Path(f"/proc/{process_id}/mem").open("r+b", buffering=0) as memory:
        place = 0
        for first, count in _split_runs(pages.numbers):
            wanted = count * PAGE_BYTES
            address = _address_of(ranges, first * PAGE_BYTES, wanted)
            done = os.pwritev(memory.fileno(), [view[place : place + wanted]], address)
            if done != wanted:
                raise SandboxError(
                    f"process {process_id}: wrote {done} of {wanted} bytes at {address:#x}"
                )
            place += wanted


def _find_mappings(process_id: int, memory_file: Path) -> list[tuple[int, int, int]]:
    """Start, end and offset in the file of each private mapping of it, by offset."""
    found = []
    status = memory_file.stat()
    wanted = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
    for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
        addresses, permissions, offset, device, inode, *_ = line.split()
        major, minor = (int(part, 16) for part in device.split(":"))
        if (major, minor, int(inode)) == wanted and permissions[3] == "p":
            start, end = (int(part, 16) for part in addresses.split("-"))
            found.append((start, end, int(offset, 16)))
    if not found:
        raise SandboxError(f"process {process_id} does not map {memory_file} privately")
    return sorted(found, key=lambda item: item[2])


def _split_runs(numbers: numpy.ndarray) -> list[tuple[int, int]]:
    """First page and length of each stretch of neighbours."""
    if not len(numbers):
        return []
    breaks = numpy.flatnonzero(numpy.diff(numbers) != 1) + 1
    starts = numpy.concatenate(([0], breaks))
    lengths = numpy.diff(numpy.concatenate((starts, [len(numbers)])))
    runs = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        for place in range(0, length, _MAX_RUN_PAGES):
            runs.append((int(numbers[start]) + place, min(_MAX_RUN_PAGES, length - place)))
    return runs


def _address_of(ranges: list[tuple[int, int, int]], offset: int, length: int) -> int:
    for start, end, first in ranges:
        if first <= offset and offset + length <= first + end - start:
            return start + offset - first
    raise SandboxError(f"no mapping holds bytes {offset} to {offset + length} of the guest")
