"""SIGKILL in the middle of a load, an offload or a save: what was there is whole, and the next process goes on."""

import json
from pathlib import Path

import pytest

from support import run_program

# The parent itself uses nothing of overspill that starts threads, so that its children can.
PROGRAM = """
    import gc, json, shutil
    from pathlib import Path

    import pytest
    import torch
    import torch._dynamo  # which the children would import one by one, as soon as they load something

    import overspill
    from faults.injection import Faults, install
    from faults.test_random_sequences import IDS, build, same, state_of, stored_in
    from support import aligned, came_to_its_end, die, in_child, loaded, save_checkpoint

    class Killer(Faults):
        # Stands before each call that touches files. The last one is done by half, where that can be.
        def __init__(self, last):
            super().__init__(0)
            self.last = last

        def tears(self, name):
            return self.calls == self.last

        def meet(self, name, nbytes=None):
            if self.calls == self.last:
                die()
            self.calls += 1
            return nbytes

    def output(model):
        with torch.no_grad():
            return model(IDS)

    def files(folder):
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    # Each: what a process is killed in the middle of, and what must hold when the next one comes.

    def converting_load(folder):
        with overspill.empty_weights():
            model = build().eval()
        overspill.load(
            model, folder / "source", max_memory={}, dtype=torch.float64, offload_folder=folder / "work", progress=False
        )
        return model

    class Load:
        def prepare(self, folder):
            pass

        def work(self, folder):
            converting_load(folder)

        def check(self, folder):
            assert same(stored_in(folder / "source"), old)
            model = converting_load(folder)
            assert torch.equal(output(model), output(aligned(reference.double())))
            del model
            gc.collect()
            left = [entry for entry in (folder / "work").iterdir() if entry.name != "mine.txt"]
            assert not [entry for entry in left if not entry.name.startswith("overspill-")], left
            # A kill before the mark stood leaves a folder that may be anybody's: no more than one, and no tensors.
            assert len(left) <= 1, left
            assert not list((folder / "work").rglob("tensors.bin")), left

    def offload(folder, modules=None):
        model = aligned(build()).eval()
        model.load_state_dict(old)
        overspill.offload(model, to="disk", modules=modules, folder=folder / "work", min_bytes=0)
        return model

    class Offload:
        def prepare(self, folder):
            assert in_child(lambda: offload(folder, ["blocks.0"])) == 0  # an earlier run, that ended well
            self.before = files(folder / "work")
            assert len(self.before) == 4, list(self.before)  # its mark, its two files, and somebody else's

        def work(self, folder):
            offload(folder)

        def check(self, folder):
            now = files(folder / "work")
            for name, content in self.before.items():  # replaced by the same values, if at all
                assert name.endswith("index.json") or now[name] == content, name
            model = offload(folder)
            assert torch.equal(output(model), output(reference))
            overspill.restore(model, delete=True)
            assert same(state_of(model), old)
            assert [p.name for p in (folder / "work").rglob("*") if p.is_file()] == ["mine.txt"], files(folder / "work")

    class Save:
        size = 6000

        def prepare(self, folder):
            pass

        def edited(self, folder, tier):
            model = loaded(build, folder / "source", tier)
            with torch.no_grad():
                model.blocks[0].up.weight.fill_(1)
            return model

        def work(self, folder):
            overspill.save(self.edited(folder, "mixed"), folder / "source", max_shard_size=self.size, progress=False)

        def check(self, folder):
            found = stored_in(folder / "source")
            assert same(found, old) or same(found, new)
            overspill.save(self.edited(folder, "disk"), folder / "source", max_shard_size=12000, progress=False)
            assert same(stored_in(folder / "source"), new)
            assert not [path for path in (folder / "source").iterdir() if "overspill" in path.name]

    class SaveWhole(Save):
        size = "1GB"

    def fresh(folder, case):
        shutil.rmtree(folder, ignore_errors=True)
        save_checkpoint(reference, folder / "source")
        (folder / "work").mkdir()
        (folder / "work" / "mine.txt").write_text("mine")
        case.prepare(folder)

    def run(case, folder, last):
        # Whether the work came to its end.
        def work():
            with pytest.MonkeyPatch.context() as patch:
                killer = Killer(last)
                install(killer, patch)
                case.work(folder)
                (folder / "calls").write_text(str(killer.calls))

        return came_to_its_end(in_child(work), f"killed at call {last}")

    def kill(case, folder, points):
        fresh(folder, case)
        assert run(case, folder, None)
        calls = int((folder / "calls").read_text())
        last = sorted({round(n * (calls - 1) / (points - 1)) for n in range(points)}) if points else range(calls)
        for n in last:
            fresh(folder, case)
            killed = not run(case, folder, n)
            assert in_child(lambda: case.check(folder)) == 0, f"killed at call {n} of {calls}: {sorted(files(folder))}"
            assert (folder / "work" / "mine.txt").read_text() == "mine"
            assert killed or n > 0.8 * calls, (n, calls)  # threads read in another order each time, and more or less
        return len(last)

    torch.manual_seed(0)
    reference = aligned(build()).eval()
    old = state_of(reference)
    new = {name: value.clone() for name, value in old.items()}
    new["blocks.0.up.weight"].fill_(1)
    gc.freeze()  # children share these pages
    cases = {"load": Load(), "offload": Offload(), "save": Save(), "save in one file": SaveWhole()}
    print(json.dumps({name: kill(case, Path(ROOT) / name, POINTS) for name, case in cases.items()}))
"""


def kill(root: Path, points: int, timeout: float) -> dict[str, int]:
    """How often each verb was killed: at `points` of its calls that touch files, or before each of them if 0."""
    program = PROGRAM.replace("ROOT", repr(str(root))).replace("POINTS", str(points))
    counts: dict[str, int] = json.loads(run_program(program, timeout))
    return counts


def test_a_kill_leaves_what_was_there_and_the_next_process_goes_on(tmp_path: Path) -> None:
    assert min(kill(tmp_path, 6, 120).values()) == 6


@pytest.mark.soak
def test_a_kill_at_each_call_that_touches_files(tmp_path: Path) -> None:
    counts = kill(tmp_path, 0, 1800)
    assert min(counts.values()) >= 12, counts
