"""The compiler cache in front of the compilers: ccache or sccache, its folder, its remote, and how often it had the object.

ccache runs the compiler as it is, so a cached object has the bytes of one compiled without it. sccache takes nvcc's steps
apart and names its temporary files itself: objects are the same from one sccache to the next, but not those of plain nvcc.
"""

import json
import os
import subprocess
from pathlib import Path

from scheduling.relay import Relay

_SCCACHE_FLAG = "--objdir-as-tempdir"
"""sccache 0.16 cannot follow nvcc with it; it needs it no more, for its temporary files have fixed names."""


def opened(plan):
    """The cache that a plan asks for: `tool`, `program`, `folder`, `space` (objects of other spaces are never taken), `remote`
    (a Unix socket where a Redis answers, or none)."""
    if not plan:
        return Off()
    return {"ccache": Ccache, "sccache": Sccache}[plan["tool"]](plan)


class Off:
    """No cache."""

    def __init__(self):
        self.command = []
        self.environment = {}

    def start(self, folder):
        """Prepare; `folder` is for files of this run."""

    def stop(self):
        """End, and tell hits and misses."""


class Ccache:
    """Runs as the compiler's parent; nothing stays behind."""

    def __init__(self, plan):
        self._plan = plan
        self.command = [plan["program"]]
        self.environment = {}

    def start(self, folder):
        """See Off."""
        self._log = Path(folder, "ccache.stats")
        self.environment = {
            "CCACHE_DIR": self._plan["folder"],
            "CCACHE_NAMESPACE": self._plan["space"],
            # time stamps are clamped: two compilers may share one
            "CCACHE_COMPILERCHECK": "content",
            "CCACHE_MAXSIZE": "10G",
            "CCACHE_STATSLOG": str(self._log),
        }
        if self._plan.get("remote"):
            self.environment["CCACHE_REMOTE_STORAGE"] = f"redis+unix:{self._plan['remote']}"

    def stop(self):
        """See Off."""
        said = self._log.read_text().split() if self._log.exists() else []
        hits = said.count("direct_cache_hit") + said.count("preprocessed_cache_hit")
        remote = {name: said.count(f"remote_storage_{name}") for name in ("hit", "miss", "error", "timeout")}
        return {"tool": "ccache", "hits": hits, "misses": said.count("cache_miss"), "remote": remote}


class Sccache:
    """A server runs the compilers; it is started before them, so that it carries no unit's mark, and ended with them."""

    def __init__(self, plan):
        self._plan = plan
        self._relay = None
        self.command = [plan["program"]]
        self.environment = {}

    def start(self, folder):
        """See Off."""
        self.environment = {
            "SCCACHE_SERVER_UDS": str(Path(folder, "sccache")),
            "SCCACHE_IDLE_TIMEOUT": "0",
            "SCCACHE_C_CUSTOM_CACHE_BUSTER": self._plan["space"],
            "NVCC_APPEND_FLAGS": os.environ.get("NVCC_APPEND_FLAGS", "").replace(_SCCACHE_FLAG, "").strip(),
        }
        if self._plan.get("remote"):
            self._relay = Relay.to_unix(self._plan["remote"])
            self.environment["SCCACHE_REDIS_ENDPOINT"] = f"redis://127.0.0.1:{self._relay.port}"
            self.environment["SCCACHE_REDIS_KEY_PREFIX"] = self._plan["space"]
        else:
            self.environment["SCCACHE_DIR"] = self._plan["folder"]
        self._run("--start-server")

    def stop(self):
        """See Off."""
        stats = json.loads(self._run("--show-stats", "--stats-format", "json"))["stats"]
        self._run("--stop-server")
        if self._relay is not None:
            self._relay.close()
        hits, misses = (sum(stats[name]["counts"].values()) for name in ("cache_hits", "cache_misses"))
        remote = {"error": stats["cache_read_errors"] + stats["cache_write_errors"], "timeout": stats["cache_timeouts"]}
        return {"tool": "sccache", "hits": hits, "misses": misses, "remote": remote if self._relay else {}}

    def _run(self, *words):
        done = subprocess.run(
            [*self.command, *words], env=os.environ | self.environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"forge: sccache {words[0]}: {(done.stderr or done.stdout).strip()}")
        return done.stdout
