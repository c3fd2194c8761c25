"""torch's gradient scalers, beside gradients that lie in host memory.

Note: why something of torch's is replaced. `torch.amp.GradScaler` brings the scale to where gradients are without
waiting for it. For host memory that is a copy to pinned memory which the CPU reads at once: gradients are divided by
whatever was there, and an overflow that was found is overwritten by the zero that arrives late. That is silently wrong
(pytorch#176429 tells the same of FSDP's scaler). Nothing of ours is called in between, and trainers make their scalers
themselves. So the one method that copies waits, for host memory alone, from the first model on that is offloaded beside
an accelerator. It gives what it gave, only later, so it stays when that model is restored.
"""

from typing import Any, Final

import torch
from torch import nn
from torch.amp import grad_scaler

from overspill.managed import WHEN_MANAGED, managed

_CLASS: Final[Any] = getattr(grad_scaler, "_MultiDeviceReplicator", None)
"""None in a torch that has mended it, or moved it."""


def _wait_for_scales(model: nn.Module) -> None:
    """Have scalers wait for what they bring to host memory, if the gradients of `model` may lie there."""
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


WHEN_MANAGED.append(_wait_for_scales)
