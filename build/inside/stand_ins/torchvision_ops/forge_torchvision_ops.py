"""Declares the two operators whose absence stops torchvision's import beside a CPU build of torch.

Read by a .pth file at every start of Python, so it only waits: torch is imported when torchvision is.
"""

import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and type(self).library is None:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            # the declarations live as long as this object
            type(self).library = library
        return


sys.meta_path.insert(0, _BeforeTorchvision())
