"""`overspill plan`: what goes where within a budget, and what a pass will cost, before anything is loaded."""

import secrets
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import overspill
from overspill import devices
from overspill.cli.errors import require
from overspill.cli.options import Budget, Debug, Device, Json, MaxMemory, parse_dtype
from overspill.cli.output import Output
from overspill.config import format_size
from overspill.devices import CPU
from overspill.errors import BudgetError
from overspill.integrations.configs import skeleton_from_config
from overspill.integrations.transformers import cache_bytes
from overspill.plan import Plan, Rates, Tier, as_device, as_place
from overspill.planner import Budget as Capacities
from overspill.planner import plan_within
from overspill.units import Cutter

_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")


def _picture(path: Path) -> Path:
    if path.suffix.lower() not in _PICTURES:
        raise typer.BadParameter(f"{str(path)!r} does not end in one of {', '.join(_PICTURES)}. Write plan.png")
    return path


def plan(
    context: typer.Context,
    path: Annotated[str, typer.Argument(help="A folder with a config.json, or a config.json: no weights are needed.")],
    max_memory: MaxMemory = None,
    dtype: Annotated[
        torch.dtype | None,
        typer.Option(parser=parse_dtype, help="Of floating-point weights. Left out: the config's.", show_default=False),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Leave room for texts of so many tokens.", show_default=False),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="So many texts at once. Left out: one.", show_default=False)
    ] = None,
    device: Device = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", parser=lambda text: _picture(Path(text)), metavar="FILE", help="Draw it, too.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what goes where within a budget, and what a pass will cost. Nothing is downloaded or loaded.

    The devices need not be there: plan here for the machine that you will run on.
    """
    output: Output = context.obj
    if batch is not None and context_length is None:
        raise typer.BadParameter("--batch has no effect without --context, the tokens of each text. Give both")
    require("transformers", "a plan from a config")
    made = plan_for(skeleton_from_config(path, dtype), max_memory, device, context=context_length, batch=batch)
    if plot is not None:
        _draw(made, plot)
    output.result(document(made), str(made), f"\n{verdict(made)}")


def plan_for(
    model: nn.Module,
    max_memory: Budget | None,
    device: int | str | None,
    *,
    context: int | None = None,
    batch: int | None = None,
) -> Plan:
    """The plan, also for devices that this machine does not have."""
    main = None if device is None else as_device(device)
    places = {as_place(key, what="--max-memory"): key for key in max_memory or ()}
    named = sorted((d for d in places if d is not None and d.type != "cpu"), key=lambda d: d.index)
    present = devices.accelerators()
    absent = [d for d in named if d not in present]
    if absent and main is None:
        main = named[0]
    if not absent or main not in present:
        return overspill.plan(model, max_memory, context=context, batch=batch, device=main)
    # Some are here and some are not, which the library takes for a mistake: whoever loads would be told too late.
    cache = 0 if context is None else cache_bytes(model, context, batch or 1, None)
    assert max_memory is not None
    capacity = {d: int(max_memory[places[d]]) if d in places else 0 for d in dict.fromkeys([main, *named, CPU])}
    for d in named:
        if capacity[d] <= cache:
            raise BudgetError(f"the cache of {format_size(cache)} leaves nothing of {d}. Give it more")
        capacity[d] -= cache
    budget = Capacities(device=main, capacity=capacity, headroom=dict.fromkeys(named, cache) if cache else {})
    return plan_within(budget, Cutter(model), rates=Rates.assumed(main))


def verdict(made: Plan) -> str:
    """Whether it fits, in a sentence."""
    total = made.resident_bytes + made.cpu_bytes + made.disk_bytes + made.stays_nbytes
    resident = made.resident_bytes + made.stays_nbytes
    if resident == total:
        return f"It fits: all of its {format_size(total)} are where they compute."
    streamed = [
        f"{format_size(nbytes)} from {where}"
        for nbytes, where in ((made.cpu_bytes, "CPU memory"), (made.disk_bytes, "disk"))
        if nbytes
    ]
    fits = f"{format_size(resident)} of its {format_size(total)} are resident"
    return f"It runs: {fits}, and {' and '.join(streamed)} are streamed."


def document(made: Plan) -> dict[str, Any]:
    """The plan as data."""
    return {
        "device": str(made.device),
        "total_bytes": made.resident_bytes + made.cpu_bytes + made.disk_bytes + made.stays_nbytes,
        "resident_bytes": made.resident_bytes,
        "cpu_bytes": made.cpu_bytes,
        "disk_bytes": made.disk_bytes,
        "small_tensors_bytes": made.stays_nbytes,
        "fits": not (made.cpu_bytes or made.disk_bytes),
        "window_bytes": made.window,
        "budgets": {str(place): nbytes for place, nbytes in made.budgets.items()},
        "headroom": {str(place): nbytes for place, nbytes in made.headroom.items()},
        "pass": {
            "streamed_bytes": made.streamed_bytes,
            "least_seconds": made.predicted_seconds,
            "link_bytes_per_second": made.rates.link,
            "link_measured": made.rates.link_measured,
            "disk_bytes_per_second": made.rates.disk,
            "disk_measured": made.rates.disk_measured,
        },
        "units": [
            {
                "name": placement.unit.name,
                "bytes": placement.unit.nbytes,
                "rests_on": str(placement.device) if placement.tier is Tier.DEVICE else placement.tier.value,
                "runs_on": str(placement.device),
            }
            for placement in made.placements
        ],
        "device_map": made.device_map,
    }


def _draw(made: Plan, path: Path) -> None:
    """Aside first: an interrupt leaves no half of a picture."""
    aside = path.with_name(f".{path.stem}.overspill-{secrets.token_hex(4)}{path.suffix}")
    try:
        made.plot(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
