"""Read by Python at every start, through PYTHONPATH: makes the server's own code breakable while it runs.

It takes the place of a `sitecustomize` of the image, if there is one, so that one is run first. Files ending in `.pth` are
read by Python itself and are not touched by this.
"""

import importlib.machinery
import importlib.util
import pathlib
import sys


def _chain() -> None:
    """Run the sitecustomize that would have been found without this folder."""
    here = pathlib.Path(__file__).resolve().parent
    others = [place for place in sys.path if pathlib.Path(place or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


_chain()

import forge_faults  # noqa: E402

forge_faults.install()
