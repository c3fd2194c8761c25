"""Attention's outputs, which cost most to compute again for each of their bytes: a recomputed block may keep them.

Note: how a block keeps them. While a block is called, a mode of torch's dispatcher sees each operation below autograd.
What a fused attention kernel returns is put aside, as the block's inputs are. In the replay the kernel is not run: its
results are given instead, and autograd saves those. Attention with dropout is run again, since it draws random numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)

_FUSED = frozenset(getattr(torch.ops.aten, name).default for name in _KERNELS if hasattr(torch.ops.aten, name))

_DEAR = 4 * 10**11
"""Products of a query's element with one of a key. Work grows with the number of keys, the bytes of the result do not;
but to look at each operation of a block twice takes time too. Blocks of a 3B model on an H200, each with 2e11 products
(8,192 tokens): to keep the results took 1.10 × a step whose inputs stay, to compute them again 0.98 ×."""

Kept = list[Callable[[], Any]]
"""What gives back the results of one kernel."""


class KeepAttention(TorchDispatchMode):
    """Within, the results of attention kernels are put aside."""

    def __init__(self, keep: Callable[[torch.Tensor], Callable[[], torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[Kept] = []
        self._keep = keep

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if is_dear(func, args, kwargs or {}):
            self.results.append([self._put_aside(result) for result in results])
        return results

    def _put_aside(self, result: Any) -> Callable[[], Any]:
        if not isinstance(result, torch.Tensor):
            return lambda: result
        kept = self._keep(result)
        return lambda: kept().detach()  # a tensor of its own each time: autograd writes to what an operation returns


class GiveAttention(TorchDispatchMode):
    """Within, attention kernels are not run: what they returned the first time is given."""

    def __init__(self, results: Sequence[Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = iter(results)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_dear(func, args, kwargs or {}):
            kept = next(self._results, None)
            if kept is not None:  # else the replay differs, which is found out when it saves other tensors
                return tuple(give() for give in kept)
        return func(*args, **(kwargs or {}))


def is_dear(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation is attention that takes long, and draws no random numbers."""
    if func not in _FUSED:
        return False
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given["query"].numel() * given["key"].shape[-2] >= _DEAR and not given.get("dropout_p", 0.0)
