"""What a script that compiles opens around its ninja."""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from scheduling import cache
from scheduling.broker import Broker, say


class Scheduler:
    """Use as a context manager. Ends with no process of this run left.

    `plan`: `slots` (units at a time), `budget` (bytes that all may hold together), `floor` (bytes the machine keeps),
    `sizes` ("name|architecture|compiler" -> bytes of a unit that was compiled before), `patience` (seconds to wait for others
    to give memory back), `keep_going` (after a unit that failed), `settle`
    (seconds without a new unit before the first one starts), `cache` (see `cache.py`). `versions`: compiler -> its version.
    """

    def __init__(self, plan, versions=None):
        self._folder = Path(tempfile.mkdtemp(prefix="forge-"))
        self._cache = cache.opened(plan.get("cache"))
        self._broker = Broker(plan, versions or {}, str(self._folder / "socket"))

    @property
    def launcher(self):
        """The words to put in front of a compiler."""
        return [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py"))]

    @property
    def window(self):
        """How many units ninja should start; most wait, so that the heaviest of many can go first."""
        return self._broker.slots + 62

    @property
    def environment(self):
        """What ninja must have in its environment; whole once the context is entered."""
        words = {
            "FORGE_SCHEDULER": str(self._folder / "socket"),
            "FORGE_COMPILER_CACHE": json.dumps(self._cache.command),
        }
        return words | self._cache.environment

    @property
    def cmake_options(self):
        """Options that make CMake (3.21 and later) use the launcher for C, C++ and CUDA, linking too."""
        words = ";".join(self.launcher)
        kinds = [(language, tool) for language in ("C", "CXX", "CUDA") for tool in ("COMPILER", "LINKER")]
        return [f"-DCMAKE_{language}_{tool}_LAUNCHER={words}" for language, tool in kinds]

    def launched(self, compiler):
        """A command line of the launcher and a compiler, for build files that name a compiler."""
        return " ".join([*self.launcher, str(compiler)])

    def __enter__(self):
        self._began = time.monotonic()
        self._cache.start(self._folder)
        self._broker.start()
        return self

    def __exit__(self, *_):
        self._broker.stop()
        if (hits := self._cache.stop()) is not None:
            say({"event": "cache", **hits})
        shutil.rmtree(self._folder, ignore_errors=True)
        seen = self._broker.seen
        wall = round(time.monotonic() - self._began, 1)
        say({"event": "summary", "wall": wall, **seen, "cpu": round(seen["cpu"], 1)})
