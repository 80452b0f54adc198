"""The GPUs of this host: which there are, which a serving uses, whose they are now, and what they give back."""

from forge_validate.gpu.choice import chosen
from forge_validate.gpu.fit import demand_fit, fits
from forge_validate.gpu.inventory import Gpu, Inventory, Lost, Process, inventory
from forge_validate.gpu.locks import held, lock_folder
from forge_validate.gpu.memory import Baseline, await_baseline, baseline, used

__all__ = [
    "Baseline",
    "Gpu",
    "Inventory",
    "Lost",
    "Process",
    "await_baseline",
    "baseline",
    "chosen",
    "demand_fit",
    "fits",
    "held",
    "inventory",
    "lock_folder",
    "used",
]
