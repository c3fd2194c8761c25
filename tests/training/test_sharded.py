"""Models whose weights FSDP or DDP looks after: what their blocks save is away all the same."""

import copy
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

import overspill
from overspill.training.activations import Limits
from support import aligned
from training.loops import Block, Net, activations_of, batches, loss_of

Wrap = Callable[[Net], nn.Module]


def by_block(net: Net, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh)
    return net


def by_block_and_part(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in net.blocks:
        fully_shard(block.down, mesh=mesh)
    return by_block(net)


def gathered_once(net: Net) -> nn.Module:
    return by_block(net, reshard_after_forward=False)


def as_one(net: Net) -> nn.Module:
    fully_shard(net, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return net


def by_the_first_fsdp(net: Net, *, original: bool = True) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        net, auto_wrap_policy=policy, use_orig_params=original, device_id=torch.device("cpu")
    )


def by_the_first_fsdp_flat(net: Net) -> nn.Module:
    return by_the_first_fsdp(net, original=False)


WRAPS: list[Wrap] = [
    DistributedDataParallel,
    by_block,
    by_block_and_part,
    gathered_once,
    as_one,
    by_the_first_fsdp,
    by_the_first_fsdp_flat,
]


@pytest.fixture(scope="module")
def _alone_in_the_world() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def trained(model: nn.Module) -> list[torch.Tensor]:
    """The losses of some steps, and the weights behind them. Each process has texts of its own."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    torch.manual_seed(3)  # of dropout
    for ids, following in batches(4, "cpu"):
        optimizer.zero_grad()
        loss = loss_of(model, (ids.roll(distributed.get_rank(), 1), following))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters())]


def assert_same_bits(wrap: Wrap, *, recompute: bool, offloaded_first: bool) -> None:
    torch.manual_seed(0)
    net = Net(4)
    expected = trained(aligned(wrap(copy.deepcopy(net))))
    model = net if offloaded_first else wrap(net)
    overspill.offload_training(model, recompute=recompute)
    activations = activations_of(model)
    found = trained(aligned(wrap(net) if offloaded_first else model))
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert activations.nbytes_sent > 0, "nothing left the device"


@pytest.mark.usefixtures("_alone_in_the_world")
@pytest.mark.filterwarnings("ignore:FSDP:UserWarning", "ignore:.*deprecated:FutureWarning")  # torch's, of itself
@pytest.mark.parametrize("offloaded_first", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_what_blocks_save_is_away_while_others_look_after_weights(
    wrap: Wrap, recompute: bool, offloaded_first: bool
) -> None:
    assert_same_bits(wrap, recompute=recompute, offloaded_first=offloaded_first)


def of_two(rank: int, folder: str) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    pytest.MonkeyPatch().setattr(
        Limits, "usual", classmethod(lambda cls, *_, **__: Limits(small=0, held=0, ahead=1 << 13))
    )
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    assert_same_bits(by_block, recompute=True, offloaded_first=False)
    distributed.destroy_process_group()
    # Gloo's threads outlive their group, and torch aborts, once in a while, where they meet the interpreter's end,
    # also without us (torch 2.13.0).
    os._exit(0)


def test_two_processes_share_the_weights_of_recomputed_blocks(tmp_path: Path) -> None:
    spawn(of_two, (str(tmp_path),), nprocs=2)
