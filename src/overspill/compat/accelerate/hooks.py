"""The names of `accelerate.hooks`."""

from overspill.compat.accelerate.dispatching import remove_hook_from_submodules
from overspill.compat.accelerate.whole import UserCpuOffloadHook

__all__ = ["UserCpuOffloadHook", "remove_hook_from_submodules"]
