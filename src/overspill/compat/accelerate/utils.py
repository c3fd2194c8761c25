"""The names of `accelerate.utils`."""

from overspill.compat.accelerate.aligning import align_module_device, has_offloaded_params
from overspill.compat.accelerate.dispatching import load_checkpoint_in_model
from overspill.compat.accelerate.planning import get_balanced_memory, get_max_memory, infer_auto_device_map

__all__ = [
    "align_module_device",
    "get_balanced_memory",
    "get_max_memory",
    "has_offloaded_params",
    "infer_auto_device_map",
    "load_checkpoint_in_model",
]
