"""Records which functions of the project run in this process; put first on PYTHONPATH by `tests.reached`.

Python functions by a trace hook in every thread; functions that numba compiles, which no hook
sees, by whether they have a compiled signature when the process ends. What was seen is written every
two seconds too, since many processes end by a signal.
"""

import atexit
import json
import os
import sys
import threading
import time

FOLDER = os.environ.get("OSTINATO_REACHED_FOLDER", "")
ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../../.."))
PRODUCT = tuple(f"{ROOT}/{name}/" for name in ("flows", "tasks", "infra", "models", "kernels"))
OTHERS = {"uvicorn", "prefect"}  # programs that run none of ours, slowly under a hook
WRITE_SECONDS = 2.0


class Recorder:
    """Code objects seen in one process."""

    def __init__(self, folder):
        self.folder = folder
        self.codes = set()
        self.paths = {}  # of files by the name that code has for them, which may lead over a link
        self.writing = threading.Lock()
        self.started = time.time_ns()  # a process id is used again

    def hook(self, frame, event, argument):
        """The trace hook, called once per Python call; no hook for its lines."""
        self.codes.add(frame.f_code)

    def start(self):
        threading.settrace(self.hook)
        threading.Thread(target=self._write_regularly, daemon=True, name="reached").start()
        sys.settrace(self.hook)
        atexit.register(self.write)

    def write(self):
        """Writes places in the product as [path in the repository, first line]."""
        places = {(code.co_filename, code.co_firstlineno) for code in list(self.codes)}
        places |= set(self._compiled())
        places = {(self._path(file), line) for file, line in places}
        target = os.path.join(self.folder, f"{os.getpid()}-{self.started}.json")
        with self.writing:
            with open(target + ".part", "w") as part:
                json.dump(sorted(place for place in places if place[0]), part)
            os.replace(target + ".part", target)

    def _path(self, file):
        """Empty for a file that is no part of the product."""
        if file not in self.paths:
            real = os.path.realpath(file)
            self.paths[file] = os.path.relpath(real, ROOT) if real.startswith(PRODUCT) else ""
        return self.paths[file]

    def _compiled(self):
        if "numba" not in sys.modules:
            return
        for name, module in list(sys.modules.items()):
            if not name.startswith("ostinato."):
                continue
            for value in list(vars(module).values()):
                # asks nothing of other objects: some raise whatever attribute is asked for
                if type(value).__module__ == "numba.core.registry" and value.signatures:
                    code = value.py_func.__code__
                    yield code.co_filename, code.co_firstlineno

    def _write_regularly(self):
        sys.settrace(None)
        while True:
            time.sleep(WRITE_SECONDS)
            try:
                self.write()
            except (OSError, RuntimeError):  # the folder is gone, or modules change meanwhile
                continue


if FOLDER and not OTHERS.intersection(sys.orig_argv):
    Recorder(FOLDER).start()
