"""Boxes that live at the same time: what one does to files that all have, no other sees."""

import asyncio
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import SandboxError
from tests.contracts.sandbox_backends import (
    BACKENDS,
    COMMAND_SECONDS,
    Bench,
    running_bench,
    wordkit_spec,
)

# of every mount that a box has of the host, a folder and a file; and the devices
PLACES = """
import glob, os, sys
def places():
    libraries = [line.split()[-1] for line in open('/proc/self/maps') if '/libc' in line]
    files = ['/usr/bin/env', '/opt/python/bin/python3', '/sandbox/agent', '/repo/wordkit/counting.py', libraries[0]]
    files += [one for one in glob.glob('/usr/lib64/*') + glob.glob('/usr/lib/git-core/*') if os.path.isfile(one)][:2]
    devices = ['/dev/' + name for name in ('null', 'zero', 'full', 'random', 'urandom')]
    folders = {os.path.dirname(one) for one in files}  # into copies of a repository the host looks, to measure them
    return files, sorted(one for one in folders if not one.startswith('/repo')), devices
files, folders, devices = places()
every = files + folders + devices
"""
WAIT = """
import time
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
"""
HOLD = """
import fcntl, struct
WORD = 'hhqqi4x'
kept = []
for place in every:
    try: kept.append(os.open(place, os.O_RDWR))
    except OSError: kept.append(os.open(place, os.O_RDONLY))
    for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK):
        try: fcntl.fcntl(kept[-1], fcntl.F_SETLK, struct.pack(WORD, kind, 0, 0, 0, 0)); break
        except OSError: pass
    kept.append(os.open(place, os.O_RDONLY))
    fcntl.flock(kept[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    try: fcntl.fcntl(kept[-1], fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError: pass
open('/tmp/ready', 'w').close()
wait_for('/tmp/go')
"""
LOOK = """
import fcntl, json, struct
WORD = 'hhqqi4x'
seen = []
for place in every:
    descriptor = os.open(place, os.O_RDONLY)
    try: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: seen.append(['flock', place])
    told = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(WORD, fcntl.F_WRLCK, 0, 0, 0, 0))
    if struct.unpack(WORD, told)[0] != fcntl.F_UNLCK: seen.append(['lockf', place])
    try: fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK); seen.append(['lease', place])
    except OSError: pass
print(json.dumps(seen))
"""
WATCH = """
import ctypes, json, struct
library = ctypes.CDLL(None)
notices = library.inotify_init1(os.O_NONBLOCK)
names = {library.inotify_add_watch(notices, place.encode(), 0xfff): place for place in every}
assert -1 not in names
open('/tmp/ready', 'w').close()
wait_for('/tmp/go')
seen = set()
while True:
    try: text = os.read(notices, 1 << 16)
    except BlockingIOError: break
    while text:
        watch, _, _, length = struct.unpack_from('iIII', text)
        seen.add(names[watch])
        text = text[16 + length:]
print(json.dumps([['inotify', place] for place in sorted(seen)]))
"""
TOUCH = """
for place in every:
    if os.path.isdir(place): os.listdir(place)
    else: os.read(os.open(place, os.O_RDONLY | os.O_NONBLOCK), 1)
"""
# what the kernel counts for the user of the host that all boxes are
TAKE_ALL = {
    "watchers": "while library.inotify_init1(0) >= 0: pass",
    "timers": "while library.timer_create(1, None, ctypes.byref(number)) == 0: pass",
    "signals": "while library.sigqueue(os.getpid(), 40, None) == 0: pass",
}
TAKE_ONE = {
    "watchers": "assert library.inotify_init1(0) >= 0",
    "timers": "assert library.timer_create(1, None, ctypes.byref(number)) == 0",
    "signals": "assert library.sigqueue(os.getpid(), 40, None) == 0",
}
KERNEL = """
import ctypes, resource, signal
library, number = ctypes.CDLL(None), ctypes.c_void_p()
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
"""
TOOK = "open('/tmp/ready', 'w').close()\nwait_for('/tmp/go')\n"
IS_OWN_DEVICE = "python3 -c \"import os; print(os.stat('/dev/null').st_dev)\""


@pytest.fixture(scope="module", params=[name for name in BACKENDS if name != "microvm"])
def bench(request) -> Iterator[Bench]:
    with running_bench(BACKENDS[request.param]) as bench:
        yield bench


def signal(bench: Bench, before: str, after: str) -> list[str]:
    """What the two programs print, each in a box of its own: the second runs while the first waits."""

    async def run_both() -> list[str]:
        boxes = [await bench.backend.create(wordkit_spec()) for _ in range(2)]
        try:
            commands = [
                f"python3 -c {shlex.quote(PLACES + WAIT + text)}" for text in (before, after)
            ]
            waiting = asyncio.create_task(boxes[0].exec(commands[0], COMMAND_SECONDS))
            while not waiting.done():
                try:
                    await boxes[0].read("/tmp/ready")
                    break
                except SandboxError:
                    await asyncio.sleep(0.02)
            ran = await boxes[1].exec(commands[1], COMMAND_SECONDS)
            await boxes[0].write("/tmp/go", b"")
            results = [await waiting, ran]
            assert [result.exit_code for result in results] == [0, 0], results
            return [result.output.decode() for result in results]
        finally:
            for box in boxes:
                await box.close()

    return bench.run(run_both())


@pytest.mark.parametrize(
    ("before", "after", "teller"),
    [pytest.param(HOLD, LOOK, 1, id="locks"), pytest.param(WATCH, TOUCH, 0, id="watches")],
)
def test_files_that_all_boxes_have_tell_nothing(bench, before, after, teller):
    seen = json.loads(signal(bench, before, after)[teller])
    device = int(bench.shell(bench.create(), IS_OWN_DEVICE))
    if os.geteuid() and device == Path("/dev/null").stat().st_dev:  # SECURITY.md says so
        seen = [[channel, place] for channel, place in seen if not place.startswith("/dev/")]
    assert seen == []


@pytest.mark.parametrize("kind", TAKE_ALL)
def test_a_box_that_takes_all_it_gets_leaves_others_theirs(bench, kind):
    signal(bench, f"{KERNEL}{TAKE_ALL[kind]}\n{TOOK}", KERNEL + TAKE_ONE[kind])


def test_a_lock_is_seen_within_its_box(bench):
    """What packages use locks and watches for goes on."""
    box = bench.create()
    both = f"import subprocess, sys\n{PLACES}{WAIT}every = ['/repo/wordkit/counting.py', '/usr/bin/env']\n"
    look = f"import os\nevery = ['/repo/wordkit/counting.py', '/usr/bin/env']\n{LOOK}"
    hold = f"open('/tmp/go', 'w').close()\n{HOLD}"
    text = f"{both}{hold}print(subprocess.check_output([sys.executable, '-c', {look!r}]).decode())"
    told = json.loads(bench.shell(box, f"python3 -c {shlex.quote(text)}"))
    assert ["flock", "/usr/bin/env"] in told
    assert ["lockf", "/repo/wordkit/counting.py"] in told
