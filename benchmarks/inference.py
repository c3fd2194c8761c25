"""How fast models larger than their memory run and load, beside what the hardware allows and what the peers reach.

    PYTHONPATH=src python3 benchmarks/inference.py --gpu --out results.json
    PYTHONPATH=src python3 benchmarks/inference.py --cpu

Every row stands beside its line (the rate of the link or the disk) and its peers, all measured in the same run, near
each other. Ends with status 1 when a promise was not kept.
"""

import argparse
import faulthandler
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import cpu
from common import LLAMA_2GB, LLAMA_8B, Row, environment, report, table
from lines import filesystem, on_disk

_HANGS = 300  # seconds after which a row is taken to hang; where its threads stand is printed, and all is over


def main() -> int:
    """Run the chosen rows."""
    arguments = _arguments()
    shape = (LLAMA_8B if arguments.gpu else LLAMA_2GB).cut(arguments.layers)
    if arguments.child:
        cpu.child(arguments.child, shape, Path(arguments.folder))
        return 0
    candidates = [Path(arguments.folder)] if arguments.folder else [Path(tempfile.gettempdir()), Path.cwd()]
    parent = on_disk(candidates, (20 if arguments.gpu else 8) << 30)
    facts = environment() | {"file system": f"{filesystem(parent)} at {parent}", "layers": shape.layers}
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="overspill-", dir=parent) as folder:
        if arguments.gpu:
            import gpu  # needs a device
            from gpu_bench import Bench

            bench = Bench(shape, Path(folder))
            rows = {name: partial(row, bench) for name, row in gpu.ROWS.items()}
        else:
            on_cpu = cpu.Bench(shape, Path(folder))
            rows = {name: partial(row, on_cpu) for name, row in cpu.ROWS.items()}
        return _run(rows, arguments.rows, facts, arguments.out, arguments.limit)


def _run(
    rows: Mapping[str, Callable[[], Row]],
    chosen: Sequence[str],
    facts: dict[str, object],
    out: str | None,
    limit: float,
) -> int:
    """Each row in turn. One that fails does not take the others with it, and what is done is written at once."""
    start, done, failed = time.perf_counter(), list[Row](), dict[str, str]()
    for name in chosen or rows:
        if time.perf_counter() - start > limit:
            failed[name] = f"not begun: --limit of {limit:.0f} s was over"
            continue
        begun = time.perf_counter()
        faulthandler.dump_traceback_later(_HANGS, exit=True)
        try:
            row = rows[name]()
        except Exception:
            failed[name] = traceback.format_exc()
            print(f"\n{name} FAILED\n{failed[name]}", flush=True)
        else:
            done.append(row)
            print(f"\n{report(row)}\n    row took {time.perf_counter() - begun:.0f} s", flush=True)
        faulthandler.cancel_dump_traceback_later()
        if out is not None:
            results = {"environment": facts, "rows": [row.as_json() for row in done], "failed": failed}
            Path(out).write_text(json.dumps(results, indent=2))
    print(f"\n{table(done)}")
    for name, reason in failed.items():
        print(f"{name}: {reason.splitlines()[-1]}")
    return int(bool(failed) or any(not check.met for row in done for check in row.all_checks))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--gpu", action="store_true", help="an 8B Llama on a CUDA device; 20 GB of disk, 60 GB of memory"
    )
    where.add_argument("--cpu", action="store_true", help="a 2 GB Llama on the CPU")
    where.add_argument("--child", choices=cpu.CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=lambda text: text.split(","), default=[], help="some of them: cpu,half")
    parser.add_argument("--layers", type=int, help="a smaller model, to try the benchmark itself")
    parser.add_argument("--folder", help="where the checkpoint goes; it must be a disk, not memory")
    parser.add_argument("--out", help="a JSON file for all figures")
    parser.add_argument("--limit", type=float, default=420, help="seconds after which no further row is begun")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
