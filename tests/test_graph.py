"""What autograd keeps of a streamed unit: how gradients get home."""

import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from overspill.graph import onload


class Sent:
    """Gradients under way. They arrive when they are waited for, the first of two not before the other has."""

    def __init__(self, link: "SlowLink", copies: list[torch.Tensor]) -> None:
        self._link, self._copies = link, copies

    def wait(self) -> None:
        link = self._link
        with link.lock:
            link.waits += 1
            is_first = link.waits == 1
        if is_first:
            link.other_is_home.wait(timeout=20)
        for copy in self._copies:
            copy.fill_(1.0)


class SlowLink:
    """Sends gradients of two backwards, which have both sent theirs before either looks for them."""

    def __init__(self) -> None:
        self.lock, self.waits = threading.Lock(), 0
        self.both_have_sent, self.other_is_home = threading.Barrier(2, timeout=20), threading.Event()

    def send(self, sources: Collection[torch.Tensor], landing: Any) -> tuple[Sent, list[torch.Tensor]]:
        copies = [torch.full(source.shape, torch.nan) for source in sources]
        self.both_have_sent.wait()
        return Sent(self, copies), copies


class Landing:
    def __init__(self, link: SlowLink) -> None:
        self.link = link


def gradients_of_two_backwards() -> list[tuple[torch.Tensor, ...]]:
    """What each of two threads finds that go through the same graph at once."""
    link, found = SlowLink(), list[tuple[torch.Tensor, ...]]()
    homes = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    lives = [torch.empty_like(home, device="meta") for home in homes]  # on another device than their homes
    landing: Any = Landing(link)
    shown = onload(homes, lives, lambda first: landing, 1 << 20)
    loss = torch.stack([each.sum() for each in shown]).sum()

    def backward() -> None:
        gradients = torch.autograd.grad(loss, homes, retain_graph=True)
        found.append(tuple(gradient.clone() for gradient in gradients))
        link.other_is_home.set()

    threads = [threading.Thread(target=backward) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return found


def test_two_backwards_of_one_graph_at_once_each_wait_for_their_own_gradients() -> None:
    for _ in range(12):  # which of the two looks first is chance
        found = gradients_of_two_backwards()
        assert len(found) == 2
        assert all(torch.equal(gradient, torch.ones_like(gradient)) for each in found for gradient in each)
