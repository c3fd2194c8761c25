"""overspill runs, trains and saves PyTorch models larger than the GPU they run on."""

from overspill import errors
from overspill.api import (
    adopt,
    from_pretrained,
    load,
    offload,
    offload_activations,
    offload_training,
    plan,
    report,
    restore,
    save,
    state_dict,
    trace,
)
from overspill.offloading import Offloaded
from overspill.plan import Plan
from overspill.skeleton import empty_weights
from overspill.training.host_adamw import HostAdamW

__version__ = "0.1.0"

__all__ = [
    "HostAdamW",
    "Offloaded",
    "Plan",
    "__version__",
    "adopt",
    "empty_weights",
    "errors",
    "from_pretrained",
    "load",
    "offload",
    "offload_activations",
    "offload_training",
    "plan",
    "report",
    "restore",
    "save",
    "state_dict",
    "trace",
]
