"""What was done for a model, seen: the timeline of a trace, and the report as text and as a page."""

import json
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import StateError
from overspill.managed import managed
from overspill.plan import Plan, Tier
from support import Net, loaded, save_checkpoint, streamed_units

BLOCKS = 4


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(Net(blocks=BLOCKS), tmp_path / "checkpoint")


@pytest.fixture(params=["disk", "cpu", "mixed"])
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(checkpoint: Path, tier: str, device: str) -> nn.Module:
    return loaded(lambda: Net(blocks=BLOCKS), checkpoint, tier, device=device)


def run(model: nn.Module, times: int = 1) -> None:
    with torch.no_grad():
        for _ in range(times):
            model(torch.arange(4))
    for unit in streamed_units(model):  # what is fetched for the next pass is there, too
        if unit.fetch is not None:
            unit.fetch.wait_host()


def plan_of(model: nn.Module) -> Plan:
    manager = managed(model)
    assert manager is not None
    return manager.plan


def events(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    happened = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    return [event for event in happened if kind is None or event["cat"] == kind]


def test_a_trace_has_every_unit_with_what_was_done_for_it(
    model: nn.Module, tier: str, tmp_path: Path, moved: Counter[str]
) -> None:
    run(model)
    moved.clear()
    with overspill.trace(model, tmp_path / "trace.json"):
        run(model, times=2)
    streamed = {p.unit.name for p in plan_of(model).placements if p.tier is not Tier.DEVICE}
    computed = Counter(event["args"]["unit"] for event in events(tmp_path / "trace.json", "compute"))
    assert streamed
    assert set(computed.values()) == {2}
    brought = events(tmp_path / "trace.json", "read") + events(tmp_path / "trace.json", "copy")
    assert {event["args"]["unit"] for event in brought} <= streamed
    assert sum(event["args"]["bytes"] for event in events(tmp_path / "trace.json", "read")) == moved["disk"]
    assert (moved["disk"] > 0) == (tier == "disk") or tier == "mixed"  # of a mixed model the window may keep all
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events(tmp_path / "trace.json"))


def test_lanes_have_names(model: nn.Module, tmp_path: Path, device: str) -> None:
    with overspill.trace(model, tmp_path / "trace.json"):
        run(model)
    document = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in document if event["name"] == "thread_name"}
    assert {event["tid"] for event in document if event["ph"] == "X"} == names.keys()
    assert device in names.values()


def test_only_the_model_that_is_traced_is_in_it(checkpoint: Path, tmp_path: Path) -> None:
    mine, other = (loaded(lambda: Net(blocks=BLOCKS), checkpoint, "disk") for _ in range(2))
    with overspill.trace(mine, tmp_path / "trace.json"):
        run(other)
    assert events(tmp_path / "trace.json") == []


def test_a_trace_that_fails_within_is_written_and_over(model: nn.Module, tmp_path: Path) -> None:
    def fail() -> None:
        with overspill.trace(model, tmp_path / "trace.json"):
            run(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert events(tmp_path / "trace.json", "compute")
    before = (tmp_path / "trace.json").read_bytes()
    run(model)
    assert (tmp_path / "trace.json").read_bytes() == before
    with overspill.trace(model, tmp_path / "trace.json"):
        pass
    assert events(tmp_path / "trace.json", "compute") == []
    assert [path.name for path in tmp_path.iterdir() if "trace" in path.name] == ["trace.json"]


def test_one_trace_at_a_time(model: nn.Module, tmp_path: Path) -> None:
    with (
        overspill.trace(model, tmp_path / "one.json"),
        pytest.raises(StateError, match="already"),
        overspill.trace(model, tmp_path / "two.json"),
    ):
        pass
    assert not (tmp_path / "two.json").exists()


@pytest.mark.parametrize("look", [lambda model: overspill.trace(model, "x.json").__enter__(), overspill.report])
def test_a_model_that_is_not_managed_has_nothing_to_show(look: Any) -> None:
    with pytest.raises(StateError, match="Load"):
        look(nn.Linear(2, 2))


# ---------------------------------------------------------------- the report


def test_a_report_counts_what_was_moved(model: nn.Module, tier: str, moved: Counter[str]) -> None:
    assert overspill.report(model).passes == 0
    run(model)
    begun = overspill.report(model)
    moved.clear()
    run(model, times=3)
    report = overspill.report(model)
    assert report.passes == 4
    difference = {where: report.moved[where] - begun.moved.get(where, 0) for where in report.moved}
    assert difference == {where: nbytes for where, nbytes in moved.items() if nbytes} or tier == "mixed"
    assert report.actual_seconds is not None
    assert report.actual_seconds > 0
    assert report.needed == 4 * begun.needed
    assert report.needed >= report.ready + report.under_way
    assert report.hit_rate is not None
    assert report.hit_rate > 0.5


def test_the_text_says_what_the_numbers_are(model: nn.Module, tmp_path: Path) -> None:
    with overspill.trace(model, tmp_path / "trace.json"):
        run(model, times=2)
    text = str(overspill.report(model))
    for word in ("Net", "rests on", "passes so far: 2", "prefetch:", "waited", "predicted", "traced:"):
        assert word in text


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else_and_draws_memory_and_time(model: nn.Module, tmp_path: Path) -> None:
    assert "Nothing was traced yet" in overspill.report(model).html()
    with overspill.trace(model, tmp_path / "trace.json"):
        run(model)
    overspill.report(model).save(tmp_path / "report.html")
    page = _Page()
    page.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags["svg"] == 2
    assert page.tags["rect"] > BLOCKS
    assert page.links == []
    assert page.tags["script"] == 0
    assert overspill.report(model)._repr_html_() == overspill.report(model).html()


def test_names_are_shown_and_not_obeyed(checkpoint: Path) -> None:
    evil = type("<script>alert(1)</script>", (Net,), {})
    model = loaded(lambda: evil(blocks=BLOCKS), checkpoint, "disk")
    page = overspill.report(model).html()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_the_page_without_complaint(checkpoint: Path, tmp_path: Path) -> None:
    model = loaded(lambda: Net(blocks=BLOCKS), checkpoint, "disk")
    with overspill.trace(model, tmp_path / "trace.json"):
        run(model)
    overspill.report(model).save(tmp_path / "report.html")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'report.png'}"]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "report.html").as_uri()], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<rect") > BLOCKS
