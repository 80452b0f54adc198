"""The real bed: the rehearsal's image in a container of the engine, booted as `validate` boots it, faults mounted in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from forge_core import record as build_record
from forge_core.cli import work_folder
from forge_core.console import Console
from forge_core.engine import Engine, connect
from forge_lab.asking import Asked
from forge_lab.bed import deviations
from forge_lab.executor import Ground, seeded
from forge_lab.plan import Dtype, Trial
from forge_validate import policy, serving, suite
from forge_validate import receipt as receipts
from forge_validate.bench import rules_of
from forge_validate.boot import boot
from forge_validate.examine import Tried
from forge_validate.injected import Injected
from forge_validate.judge import Bench
from forge_validate.line import Walked
from forge_validate.pipeline import receipt_of
from forge_validate.receipt import Subject
from forge_validate.server import Server
from forge_validate.serving import Serving
from forge_validate.target import Recorded
from forge_validate.target.pull import pull
from forge_validate.target.record import recorded

PROFILE = "rehearsal"


class Rehearsal:
    """The image that the rehearsal's record names, its model, and what is asked of it."""

    def __init__(self, console: Console, *, record: Path | None = None, model: Path | None = None) -> None:
        """Raises as `recorded`, and EnvironmentFailure without an engine."""
        home = work_folder(PROFILE)
        self._console = console
        self._plan = serving.load(PROFILE)
        self.target: Recorded
        self.target, self._folder = recorded(
            record or home / build_record.FILE_NAME,
            profile=PROFILE,
            served=self._plan.model,
            model=model,
            usual_model=home / "model",
        )
        self._engine: Engine = connect(builds=False)
        self._log = work_folder("lab") / "logs" / "server.log"

    def ground(self, work: Path) -> Ground:
        """What its trials share."""
        return Ground(
            image=self.target.image.digest,
            model=self.target.model.revision,
            code=code_sha256(),
            bench=self.bench,
            work=work,
            keep=self.keep,
        )

    def keep(self, trial: Trial, judged: Bench, asked: Asked, folder: Path) -> None:
        """Leave `results.json` in `folder`: a receipt like that of a validation, which says what was done to the server."""
        target = self.target.model_copy(update={"deviations": self.target.deviations + deviations(trial.mutant)})
        plan = self._served(trial.dtype)
        subject = Subject(
            image=target.image,
            model=target.model.name,
            model_revision=target.model.revision,
            serving=plan.content_sha256(),
            **rules_of(judged),
        )
        tried = Tried(
            results=tuple(asked.results),
            exchanges=tuple(asked.exchanges.values()),
            offers=asked.offers,
            families=asked.took,
        )
        arguments = (*plan.command, *plan.arguments())
        done = Walked(target, judged, tried, subject, arguments, engine=self._engine.version)
        receipts.save(receipt_of(done), folder / receipts.FILE_NAME)

    def _served(self, dtype: Dtype) -> Serving:
        # A slow start is no trial's fault; what a validation may wait, a walk of hours may wait twice.
        phases = tuple(p.model_copy(update={"deadline": 2 * p.deadline}) for p in self._plan.phases)
        return self._plan.model_copy(update={"flags": {**self._plan.flags, "dtype": dtype}, "phases": phases})

    def bench(self, trial: Trial) -> Bench:
        """The suite, answers and policy of a trial, and the flags that the server should tell."""
        questions, known = suite.load(trial.suite, self._plan.model)
        rules = policy.load(trial.policy)
        flags = self._plan.intended() | {"dtype": trial.dtype}
        judged = Bench(questions, known, rules, self._plan.model, flags, model=self._folder)
        return seeded(judged, trial)

    @contextmanager
    def boot(self, dtype: Dtype, injected: Injected) -> Iterator[Server]:
        """A server with this number format; raises as `boot`."""
        identity = pull(self._engine, self.target)
        plan = self._served(dtype)
        inside = self._engine.client.images.get(identity).attrs.get("Config", {}).get("Env") or ()
        before = next((line.partition("=")[2] for line in inside if line.startswith("PYTHONPATH=")), "")
        mine = injected.environment.get("PYTHONPATH", "")
        path = ":".join(part for part in (mine, before) if part)
        changed = replace(injected, environment={**injected.environment, "PYTHONPATH": path})
        with boot(
            self._engine,
            identity,
            plan,
            self.target.model,
            self._folder,
            log=self._log,
            console=self._console,
            injected=changed,
        ) as server:
            yield server


def code_sha256() -> str:
    """Sha256 over what decides a verdict beside suite, answers and policy: the code and data of the gate and of the faults."""
    found = hashlib.sha256()
    for package, below in (
        ("forge_validate", ("checks", "families", "offers", "")),
        ("forge_lab", ("inside/faults", "inside/faults/forge_faults", "faults", "")),
    ):
        root = Path(str(files(package)))
        for folder in below:
            for path in sorted((root / folder).glob("*.py")) + sorted((root / folder).glob("*.yaml")):
                if path.name not in _BESIDE:
                    found.update(f"{package}/{path.relative_to(root)}\0".encode())
                    found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


# What a table says, or what else is in a plan, changes no verdict. The mutant itself is in the key.
_BESIDE = frozenset(
    ("table.py", "plan.py", "power.py", "__main__.py", "mutants.yaml", "promote.py", "report.py", "junit.py")
)
