"""Commands with which an agent does its worst to a box, by name. None needs more than a shell and Python."""


def _python(text: str) -> str:
    return "python3 -c '" + text.replace("'", '"') + "'"


MISDEEDS = {
    "files without end": _python(
        "import os, itertools\nos.mkdir('q')\n"
        "for n in itertools.count(): os.close(os.open('q/%d' % n, os.O_CREAT | os.O_WRONLY))"
    ),
    "files by daemons": "mkdir q; for n in 1 2 3; do (setsid sh -c 'n=0; while :; do n=$((n+1)); "
    "echo > q/$$-$n; done' >/dev/null 2>&1 &); done; sleep 0.3",
    "forks": "f() { f | f & }; f >/dev/null 2>&1; sleep 1",
    "memory": _python("x = []\nwhile True: x.append(bytearray(1 << 24))"),
    "deep folders": _python(
        "import os\nfor n in range(1500): os.mkdir('d' * 200); os.chdir('d' * 200)"
    ),
    "without its folder": "rm -rf /repo/* /repo/.* 2>/dev/null; rmdir /repo; cd /; rm -rf /repo/pkg",
    "closed folders": "mkdir -p c/d && touch c/d/f && chmod 0 c/d/f c/d c && chmod 0 /repo/pkg",
    "closed descriptors": "exec 0<&- 1>&- 2>&-; sleep 0.2",
    "kills the server": "kill -9 1; kill -9 -1; kill -STOP 1",
    "full /tmp": "head -c 400000000 /dev/zero | split -b 30000000 - /tmp/full",
    "full /dev/shm": "head -c 400000000 /dev/zero | split -b 30000000 - /dev/shm/full",
    "400,000 empty files": _python(
        "import os\nos.mkdir('/tmp/e')\n"
        "for n in range(400000): os.close(os.open('/tmp/e/%d' % n, os.O_CREAT | os.O_WRONLY))"
    ),
    "giant output": "head -c 300000000 /dev/zero | tr '\\0' x",
    "binary output": "head -c 100000 /dev/urandom; printf '\\377\\376\\000\\033[2J'",
    "endless output": "yes",
    "daemons": "for n in 1 2 3 4; do (setsid sleep 1000 >/dev/null 2>&1 &); done; (sleep 1000 &) ",
    "signals": "for s in 1 2 3 6 10 13 14 15 18; do kill -$s 1; kill -$s 0 2>/dev/null; done",
    "ring of links": "ln -s b a; ln -s a b; ln -s . here; ln -s / pkg/root; ln -s ../pkg pkg/pkg",
    "long names": _python(
        "import os\nfor n in range(200): open(('%03d' % n) + 'n' * 250, 'w').close()"
    ),
    "names that are no text": "touch \"$(printf 'a\\377\\n\\033b')\"; printf x > \"pkg/$(printf '\\355\\240\\200').py\"",
    "sparse files": "for n in 1 2 3 4 5 6; do truncate -s 60M sparse$n; done; truncate -s 8T huge",
    "sockets and pipes": _python(
        "import os, socket\nos.mkfifo('pipe')\nsocket.socket(socket.AF_UNIX).bind('socket')\n"
        "x = [socket.socketpair() for n in range(1500)]\nimport time\ntime.sleep(0.2)"
    ),
    "limits": "ulimit -n 3; ulimit -v 1000; ls; ulimit -f 0; echo x > y",
    "stops itself": "kill -STOP $$",
    "stops all": "kill -STOP -1",
    "not python any more": "printf '\\377\\000def (' > pkg/code.py; rm -f pkg/__init__.py",
    "a folder for a file": "rm pkg/code.py; mkdir -p pkg/code.py/x; mkfifo pkg/code.py/y",
    "a link for a file": "rm pkg/code.py; ln -s /dev/zero pkg/code.py; ln -s /proc/self/mem m.py",
    "many attributes": _python(
        "import os\nopen('x', 'w').close()\n"
        "try:\n for n in range(100): os.setxattr('x', 'user.overlay.%d' % n, b'y' * 60000)\n"
        "except OSError: pass\n"
        "try: os.setxattr('pkg', 'user.overlay.opaque', b'y')\nexcept OSError: pass"
    ),
    "renames without end": _python(
        "import os\nos.makedirs('r/s')\nfor n in range(60000): os.rename('r', 'r2'); os.rename('r2', 'r')"
    ),
    "open deleted files": _python(
        "import os, time\nx = []\n"
        "for n in range(20): f = open('gone', 'wb'); f.write(b'x' * 8000000); x.append(f); os.remove('gone')\n"
        "time.sleep(0.3)"
    ),
}
