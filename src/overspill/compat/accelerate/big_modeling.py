"""The names of `accelerate.big_modeling`."""

from overspill.compat.accelerate.dispatching import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from overspill.compat.accelerate.empty import init_empty_weights, init_on_device
from overspill.compat.accelerate.planning import get_balanced_memory, infer_auto_device_map
from overspill.compat.accelerate.whole import UserCpuOffloadHook, cpu_offload_with_hook

__all__ = [
    "UserCpuOffloadHook",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "get_balanced_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
