"""Stands in for SGLang's kernel package on a machine without a GPU: every name resolves, every call says what is missing."""

import importlib.abc
import importlib.machinery
import sys

__version__ = "0.0.0"


class _Missing:
    """A kernel that is not there: it can be imported and passed around, never called."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} needs a CUDA device; this image holds a stand-in for sgl_kernel")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"sgl_kernel.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any submodule exists, with names that resolve in the same way."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def exec_module(self, module):
        prefix = module.__name__

        def resolve(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return _Missing(f"{prefix}.{name}")

        module.__getattr__ = resolve


sys.meta_path.append(_Submodules())
