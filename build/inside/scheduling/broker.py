"""The broker: a thread that gives memory and a core to one unit after another, watches what they use, and frees what ends."""

import contextlib
import json
import os
import selectors
import socket
import threading
import time

from scheduling import memory, processes
from scheduling.admission import Unit, pick, victim
from scheduling.sizes import Sizes, margin

_TICK_S = 0.1
_LONGEST_TICK_S = 0.5
_GROWTH = 4 * 10**9
"""Bytes a second, assumed to be more than compilers on a few cores take: a look comes before the room above the floor is gone."""
_STATE_S = 2.0
_SETTLE_S = 0.2
"""At the beginning the first to ask is not the heaviest: wait until no new one comes for so long."""
_GROUP_FLOOR = 256_000_000
_ATTEMPTS = 3


def say(event):
    """One line for the one who follows; a single write, so that no other line gets into it."""
    with contextlib.suppress(OSError):
        os.write(2, f"forge-scheduler: {json.dumps(event)}\n".encode())


class Broker:
    """Listens on the Unix socket `address` from `start` to `stop`; afterwards no process of this run is left.

    For `plan` and `versions` see `Scheduler`.
    """

    def __init__(self, plan, versions, address):
        self.slots = plan.get("slots") or len(os.sched_getaffinity(0))
        self._address = address
        self._floor = plan.get("floor", 1_000_000_000)
        self._budget = plan.get("budget") or max(memory.free() - self._floor, 1)
        self._patience = plan.get("patience", 60)
        self._keep_going = plan.get("keep_going", False)
        self._settle = plan.get("settle", _SETTLE_S)
        self._versions = versions
        self._sizes = Sizes(plan.get("sizes", {}))
        self._token = os.urandom(8).hex()
        self._links = {}
        """Socket -> (unit, what came of an unfinished line)."""
        self._waiting, self._running = [], []
        self._number = 0
        self._failed = False
        self._changed = self._asked = self._told = self._measured = 0.0
        self._tick = _TICK_S
        self.seen = {"peak": 0, "free": None, "cpu": 0.0, "units": 0, "again": 0}
        """What came of it all: bytes, seconds, numbers."""

    def start(self):
        """Listen."""
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self._address)
        self._server.listen(512)
        self._end, self._ended = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._end, selectors.EVENT_READ)
        say({"event": "begin", "slots": self.slots, "budget": self._budget, "floor": self._floor})
        self._thread = threading.Thread(target=self._serve, name="scheduler", daemon=True)
        self._thread.start()

    def stop(self):
        """End, and every process of this run with it."""
        os.write(self._ended, b".")
        self._thread.join()
        for link in (self._server, *self._links):
            link.close()
        processes.kill(self._token)
        self._selector.close()
        os.close(self._end)
        os.close(self._ended)

    def _serve(self):
        try:
            self._loop()
        except Exception as error:
            # Launchers must not wait for one that is no more.
            self._note(f"the scheduler failed: {type(error).__name__}: {error}")
            for link in (self._server, *self._links):
                link.close()
            raise

    def _loop(self):
        while True:
            for key, _ in self._selector.select(self._tick if self._running or self._waiting else None):
                if key.fileobj == self._end:
                    return
                if key.fileobj is self._server:
                    link = self._server.accept()[0]
                    self._links[link] = (None, b"")
                    self._selector.register(link, selectors.EVENT_READ)
                else:
                    self._read(key.fileobj)
            self._watch()
            self._admit()

    def _read(self, link):
        unit, rest = self._links[link]
        try:
            data = link.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._gone(link, unit)
            return
        *lines, rest = (rest + data).split(b"\n")
        self._links[link] = (unit, rest)
        for line in lines:
            message = json.loads(line)
            if "name" in message:
                self._ask(link, message)
            else:
                self._done(link, self._links[link][0], message)

    def _ask(self, link, message):
        self._number += 1
        compiler = " ".join(filter(None, (message["compiler"], self._versions.get(message["compiler"]))))
        name, architecture = message["name"], message["architecture"]
        size = self._sizes.expected(name, architecture, compiler, message["kind"])
        unit = Unit(self._number, name, size, kind=message["kind"], architecture=architecture, compiler=compiler)
        unit.link = link
        self._links[link] = (unit, self._links[link][1])
        if self._failed:
            self._tell(unit, {"stop": True})
        else:
            self._waiting.append(unit)
            self._asked = time.monotonic()

    def _done(self, link, unit, message):
        now = time.monotonic()
        self._running.remove(unit)
        processes.kill(self._token, unit.number)
        unit.peak = max(unit.peak, message["rss"])
        unit.rss = 0
        again = message["status"] != 0 and (unit.killed or (message["killed"] and not unit.solo))
        if again and not self._failed:
            unit.attempts += 1
            unit.size = max(unit.size, margin(unit.peak))
            unit.solo = not unit.killed or unit.attempts >= _ATTEMPTS
            why = "was stopped, memory ran low" if unit.killed else "was killed by the kernel"
            self._note(f"{unit.name} {why}; it is compiled again" + (" with nothing beside it" if unit.solo else ""))
            unit.killed = False
            unit.cpu = {}
            self.seen["again"] += 1
            self._waiting.append(unit)
            self._tell(unit, {"again": True})
            return
        cpu = max(message["cpu"], sum(unit.cpu.values()))
        self.seen["cpu"] += cpu
        self.seen["units"] += 1
        told = {"name": unit.name, "kind": unit.kind, "architecture": unit.architecture, "compiler": unit.compiler}
        told |= {"peak": unit.peak, "cpu": round(cpu, 2), "wall": round(now - unit.began, 2), "expected": unit.size}
        say({"event": "unit", **told, "status": message["status"]})
        self._failed = self._failed or (message["status"] != 0 and not self._keep_going)
        self._changed = now
        self._tell(unit, {"end": True})

    def _gone(self, link, unit):
        """A launcher has ended, well or not: what it still held is free once its compiler is dead."""
        self._selector.unregister(link)
        del self._links[link]
        link.close()
        if unit in self._running:
            self._running.remove(unit)
            processes.kill(self._token, unit.number)
            self._note(f"the launcher of {unit.name} is gone, so is its compiler")
            self._changed = time.monotonic()
        elif unit in self._waiting:
            self._waiting.remove(unit)
        if self._failed:
            # Told only now, so that the failed one ends before those that were not compiled because of it.
            for other in self._waiting:
                self._tell(other, {"stop": True})
            self._waiting.clear()

    def _tell(self, unit, message):
        with contextlib.suppress(OSError):
            unit.link.sendall(json.dumps(message).encode() + b"\n")

    def _note(self, text):
        say({"event": "note", "text": text})

    def _watch(self):
        """Measure every unit; give one up when the memory falls below the floor."""
        now = time.monotonic()
        if now - self._measured < self._tick / 2:
            return
        self._measured = now
        found = processes.uses(self._token) if self._running else {}
        for unit in self._running:
            use = found.get(unit.number, processes.Use())
            unit.rss = use.rss
            unit.peak = max(unit.peak, use.rss, use.largest)
            unit.cpu |= use.cpu
        free = memory.free()
        self.seen["peak"] = max(self.seen["peak"], sum(use.rss for use in found.values()))
        self.seen["free"] = min(free, free if self.seen["free"] is None else self.seen["free"])
        headroom = self._headroom()
        # A look reads every process of the builder: ten a second took a tenth of a core.
        self._tick = min(max(headroom / _GROWTH, _TICK_S), _LONGEST_TICK_S) if self._running else _TICK_S
        unit = victim([u for u in self._running if not u.killed], headroom)
        # One at a time: the kernel needs a moment to take the memory back.
        if unit is not None and not any(u.killed for u in self._running):
            unit.killed = True
            processes.kill(self._token, unit.number)
        if self._running and now - self._told >= _STATE_S:
            self._told = now
            running = [[u.name, u.rss] for u in sorted(self._running, key=lambda u: u.began)]
            say({"event": "state", "running": running, "waiting": len(self._waiting), "free": free})

    def _headroom(self):
        return memory.headroom(self._floor, min(_GROUP_FLOOR, self._floor))

    def _admit(self):
        now = time.monotonic()
        if self._failed or (not self._running and now - self._asked < self._settle):
            return
        while True:
            if self._running:
                self._changed = now
            patient = now - max(self._changed, self._asked) < self._patience
            unit = pick(
                self._waiting,
                self._running,
                slots=self.slots,
                budget=self._budget,
                headroom=self._headroom(),
                patient=patient,
            )
            if unit is None:
                return
            self._start(unit, now)

    def _start(self, unit, now):
        if unit.size > self._budget:
            self._note(f"{unit.name} may need {unit.size} bytes, more than the {self._budget} there are; it runs alone")
        elif not self._running and unit.need(self._budget) > self._headroom():
            self._note(f"{unit.name} starts alone, although others leave too little memory: waiting has not helped")
        self._waiting.remove(unit)
        self._running.append(unit)
        unit.began = now
        self._tell(unit, {"mark": f"{self._token}.{unit.number}"})
