"""The simulated device's memory: never zero by chance, never someone else's without a trace, and counted."""

import pytest
import torch

pytestmark = pytest.mark.gpu

LONG = 400_000_000
"""Cycles: a fifth of a second."""
MIB = 1 << 20


def ones() -> torch.Tensor:
    return torch.ones(MIB, device="cuda:0")


def test_memory_that_nobody_has_written_is_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.empty(12345, dtype=dtype, device="cuda:0").isnan().all()


def test_memory_goes_to_whoever_comes_next_on_its_stream_and_is_nan_again() -> None:
    first = ones()
    address = first.data_ptr()
    del first
    second = torch.empty(MIB, device="cuda:0")
    assert second.data_ptr() == address
    assert second.isnan().all()
    del second
    with torch.Stream(device="cuda:0"):
        assert torch.empty(MIB, device="cuda:0").data_ptr() != address, "it is the other stream's"


@pytest.mark.parametrize("keeps", ["nothing", "the tensor", "record_stream"])
def test_what_is_freed_while_another_stream_reads_it_is_nan(keeps: str) -> None:
    source, target = ones(), torch.zeros(MIB).pin_memory()
    side = torch.Stream(device="cuda:0")
    with side:
        torch.cuda._sleep(LONG)
        target.copy_(source, non_blocking=True)
    if keeps == "record_stream":
        source.record_stream(side)
    kept = source if keeps == "the tensor" else None
    del source
    torch.cuda.synchronize()
    assert bool(target.isnan().all()) == (keeps == "nothing")
    assert kept is None or kept.sum() == MIB


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_written_before_its_memory_is_free_is_lost(waits: bool) -> None:
    source, old = torch.ones(MIB).pin_memory(), ones()
    main, side = torch.accelerator.current_stream(), torch.Stream(device="cuda:0")
    torch.cuda._sleep(LONG)  # work that uses it yet
    del old
    new = torch.empty(MIB, device="cuda:0")
    if waits:
        side.wait_stream(main)
    with side:
        new.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert bool(new.isnan().all()) == (not waits)


def test_what_is_taken_is_counted_and_the_most_of_it() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one = ones()
    two = torch.cat([one, one])
    del one
    assert torch.cuda.memory_allocated() - before == two.nbytes
    assert torch.cuda.max_memory_allocated() - before == two.nbytes + two.nbytes // 2
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() - before == two.nbytes


def test_what_is_kept_for_reuse_can_be_given_back() -> None:
    del_me = ones()
    del del_me
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    assert kept >= 4 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated()
    assert torch.cuda.mem_get_info() == (free + kept, total)


def test_there_is_an_end_of_it() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(torch.cuda.mem_get_info()[1] + 1, dtype=torch.uint8, device="cuda:0")
