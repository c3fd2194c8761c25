"""What Accelerate gives to those who run big models, under its names and signatures, built on overspill's verbs.

Where Accelerate has a name in a module of its own, it is there too: `overspill.compat.accelerate.utils`, `.hooks` and
`.big_modeling`. Accelerate itself is not imported and need not be installed. What differs is in
docs/migration-from-accelerate.md.
"""

from overspill.compat.accelerate.aligning import align_module_device, has_offloaded_params
from overspill.compat.accelerate.dispatching import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    remove_hook_from_submodules,
)
from overspill.compat.accelerate.empty import init_empty_weights, init_on_device
from overspill.compat.accelerate.planning import get_balanced_memory, get_max_memory, infer_auto_device_map
from overspill.compat.accelerate.whole import cpu_offload_with_hook

__all__ = [
    "align_module_device",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "get_balanced_memory",
    "get_max_memory",
    "has_offloaded_params",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "remove_hook_from_submodules",
]
