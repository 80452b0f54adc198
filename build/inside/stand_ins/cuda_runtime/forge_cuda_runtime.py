"""Loads the CUDA runtime's wheel before FlashInfer looks for it, as a CUDA build of torch would have done.

`flashinfer.comm` searches the process for a loaded libcudart when it is imported. Read by a .pth file at every start of Python,
so it only waits for that import.
"""

import ctypes
import importlib.abc
import sys
import sysconfig
from pathlib import Path


class _BeforeFlashInfer(importlib.abc.MetaPathFinder):
    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "flashinfer.comm" and type(self).library is None:
            found = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/lib/libcudart.so.*"))
            if found:
                type(self).library = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
        return


sys.meta_path.insert(0, _BeforeFlashInfer())
