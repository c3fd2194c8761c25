"""How large windows are, and that what they keep is brought once."""

import dataclasses
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.checkpoint.index import SourceFile
from overspill.checkpoint.reader import FileReader
from overspill.devices import CPU
from overspill.plan import Tier
from overspill.slab import Window
from overspill.store import DiskStore, HostStore
from overspill.transfer import Fetch, Piece, Transfer
from overspill.units import Unit
from overspill.windows import ample_window, kept_in_window
from support import Block, aligned, placed, run, save_checkpoint


def unit(name: str, nbytes: int, *roots: str) -> Unit:
    return Unit(name=name, roots=roots or (name,), tensors=(f"{name}.w",), nbytes=nbytes, compute=1.0)


def names(units: list[Unit]) -> set[str]:
    return {unit.name for unit in units}


LLAMA = [unit("embed", 1050), *(unit(f"block{i}", 436) for i in range(32)), unit("head", 1050)]


def test_an_ample_window_holds_five_blocks_beside_what_stands_out() -> None:
    assert ample_window(LLAMA) == 2 * 1050 + 5 * 436


def test_nothing_stands_out_where_a_third_of_the_units_is_large() -> None:
    units = [unit(str(i), 100 if i % 3 else 1000) for i in range(9)]
    assert ample_window(units) == 1000 + 100 + 100 + 1000 + 100


def test_a_window_keeps_the_large_units_and_what_else_has_room_beside_three_blocks() -> None:
    assert names(kept_in_window(LLAMA, ample_window(LLAMA))) == {"embed", "head", "block0", "block1"}
    assert names(kept_in_window(LLAMA, 2 * 1050 + 3 * 436)) == {"embed", "head"}


def test_a_window_keeps_nothing_that_would_get_in_the_way_of_streaming() -> None:
    assert kept_in_window(LLAMA, 2 * 1050 + 3 * 436 - 1) == []
    assert kept_in_window(LLAMA, 1050) == []


def test_a_window_for_everything_keeps_everything() -> None:
    assert len(kept_in_window(LLAMA, sum(u.nbytes for u in LLAMA))) == len(LLAMA)


def test_units_that_are_needed_together_can_always_stream_together() -> None:
    shared = unit("shared", 500, "a", "b", "c", "d")
    units = [shared, *(unit(name, 100, name) for name in "abcd")]
    for window in range(600, 900, 50):
        kept = kept_in_window(units, window)
        left = window - sum(u.nbytes for u in kept)
        needs = [sum(u.nbytes for u in units if root in u.roots and u not in kept) for root in "abcd"]
        assert max(needs) <= left


class Uneven(nn.Module):
    """Blocks, and one that is several times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 16384)  # 2 MiB
        self.blocks = nn.ModuleList(Block(256) for _ in range(8))
        self.fit = nn.Linear(16384, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.fit(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_what_the_window_keeps_is_brought_once_and_its_edits_are_seen(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: Counter[int] = Counter()
    for store in (HostStore, DiskStore):

        def counting(self: Any, *args: Any, fetch: Any = store.fetch) -> Any:
            fetched[self.layout.nbytes] += 1
            return fetch(self, *args)

        monkeypatch.setattr(store, "fetch", counting)
    reference = aligned(Uneven())
    checkpoint = save_checkpoint(reference, tmp_path)
    with overspill.empty_weights():
        model = Uneven()
    plan = placed(overspill.plan(model, {}, device="cpu"), tier)
    large = {p.unit.name: p.unit.nbytes for p in plan.placements if not p.unit.name.startswith("blocks")}
    block = next(p.unit.nbytes for p in plan.placements if p.unit.name == "blocks.0")
    plan = dataclasses.replace(plan, windows={plan.device: sum(large.values()) + 3 * block})
    assert plan.kept == large.keys()
    assert plan.streamed_bytes == 8 * block
    assert all(p.tier == Tier(tier) for p in plan.placements)
    overspill.load(model, checkpoint, plan, progress=False)
    x = torch.randn(2, 32)
    with torch.no_grad():
        for turn in range(4):
            if turn == 2:
                for net in (model, reference):
                    net.fit.weight.mul_(2)
            assert torch.equal(model(x), run(reference, x))
    assert fetched[large["first"]] == 1
    assert fetched[block] >= 4 * 8


def test_a_fetch_is_finished_only_when_nobody_works_on_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.transfer.CHUNK", 1024)
    (tmp_path / "bytes").write_bytes(bytes(4096))
    window, transfer = Window(4096, CPU), Transfer(CPU)
    slab = window.take(4096)
    assert slab is not None
    queued, first = Fetch.part_queued, threading.Event()

    def slow(self: Fetch, *args: Any) -> None:
        queued(self, *args)
        if not first.is_set():  # the others go on, and the last of them is done long before this thread
            first.set()
            time.sleep(0.2)

    monkeypatch.setattr(Fetch, "part_queued", slow)
    piece = Piece(SourceFile.at(tmp_path / "bytes"), 0, torch.uint8, slab.memory)
    fetch = transfer.from_disk([piece], FileReader())
    del slab, piece
    fetch.wait()
    assert window.free_bytes() == 4096
