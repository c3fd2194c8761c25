"""torch's gradient scalers, beside gradients that lie in host memory.

Note: what is mended of torch's, and how. `torch.amp.GradScaler` brings the scale to where gradients are without
waiting for it. For host memory that is a copy to pinned memory which the CPU reads at once: gradients are divided by
whatever was there, and an overflow that was found is overwritten by the zero that arrives late. That is silently wrong
(pytorch#176429 tells the same of FSDP's scaler). Nothing of ours is called in between, and trainers make their scalers
themselves. So the one method that copies waits, for host memory alone; where fused optimizers copy, homes wait
(`devices.wait_for_pinned`). And those optimizers skip a step at 1 alone, where the scaler adds up what it found on each
device: they are given 1. All of that from the first model on that is offloaded beside an accelerator. Nothing but these
mistakes is other than before, so it stays when the model is restored.
"""

from typing import Any, Final

import torch
from torch import nn
from torch.amp import grad_scaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from overspill.managed import WHEN_MANAGED, managed

_CLASS: Final[Any] = getattr(grad_scaler, "_MultiDeviceReplicator", None)
"""None in a torch that has mended it, or moved it."""


def _mend_scalers(model: nn.Module) -> None:
    """Have scalers do right by gradients of two devices, if those of `model` may lie on two."""
    manager = managed(model)
    if _CLASS is None or manager is None or manager.plan.device.type == "cpu" or hasattr(_CLASS.get, "waits"):
        return
    without_waiting = _CLASS.get

    def get(self: Any, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            found: torch.Tensor = without_waiting(self, device)
            return found
        copies: dict[torch.device, torch.Tensor] = self._per_device_tensors
        if device not in copies:
            copies[device] = self.master.to(device=device, copy=True)
        return copies[device]

    get.__dict__["waits"] = True
    _CLASS.get = get
    register_optimizer_step_pre_hook(_count_overflows_once)


def _count_overflows_once(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found = getattr(optimizer, "found_inf", None)
    if isinstance(found, torch.Tensor):
        optimizer.found_inf = found.clamp(max=1)  # type: ignore[attr-defined]


WHEN_MANAGED.append(_mend_scalers)
