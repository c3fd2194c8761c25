import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import overspill
import overspill.errors

PUBLIC_NAMES = [
    "HostAdamW",
    "Offloaded",
    "Plan",
    "__version__",
    "adopt",
    "empty_weights",
    "errors",
    "from_pretrained",
    "load",
    "offload",
    "offload_activations",
    "offload_training",
    "plan",
    "report",
    "restore",
    "save",
    "state_dict",
    "trace",
]
OPTIONAL_LIBRARIES = ["accelerate", "matplotlib", "peft", "rich", "transformers", "typer"]

ERRORS = {
    name: value
    for name, value in vars(overspill.errors).items()
    if inspect.isclass(value) and value.__module__ == "overspill.errors"
}


def printed_by(program: str) -> str:
    """What `program` prints in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(Path(overspill.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return run.stdout


def modules_imported_after_torch(statement: str) -> list[str]:
    """Names of the modules that `statement` imports in a fresh interpreter which already holds torch."""
    program = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)))"
    )
    return printed_by(program).split()


def test_the_public_names_are_exactly_these():
    assert sorted(overspill.__all__) == PUBLIC_NAMES


def test_every_public_name_resolves():
    assert [name for name in overspill.__all__ if not hasattr(overspill, name)] == []


def test_nothing_else_hangs_on_the_package_but_its_modules():
    visible = {name for name, value in vars(overspill).items() if not isinstance(value, ModuleType)}
    assert {name for name in visible if not name.startswith("_")} <= set(PUBLIC_NAMES)


def test_plan_stays_the_verb_after_its_namesake_module_is_imported():
    importlib.import_module("overspill.plan")
    assert inspect.isfunction(overspill.plan)


def test_every_error_belongs_to_the_one_tree():
    strays = [name for name, error in ERRORS.items() if not issubclass(error, overspill.errors.OverspillError)]
    assert strays == []


def test_every_error_is_drawn_in_the_tree_of_the_docstring():
    drawn = re.findall(r"^[│ ]*(?:[├└]── )?(\w+Error)\b", overspill.errors.__doc__ or "", flags=re.MULTILINE)
    assert drawn == list(ERRORS)


def test_import_leaves_the_optional_libraries_alone():
    imported = {name.partition(".")[0] for name in modules_imported_after_torch("import overspill")}
    assert sorted(imported & set(OPTIONAL_LIBRARIES)) == []


def test_import_adds_few_modules_to_those_of_torch():
    # The hub's HTTP client alone is more than a hundred modules: it is imported where a hub path is given.
    assert len(modules_imported_after_torch("import overspill")) < 90


def test_import_leaves_what_few_programs_need_until_they_do():
    imported = modules_imported_after_torch("import overspill")
    late = ["html", "huggingface_hub", "overspill.reporting", "overspill.training.offload", "psutil", "statistics"]
    assert [name for name in late if name in imported] == []
    assert [name for name in imported if name.startswith(("overspill.cli", "overspill.compat"))] == []


def test_import_takes_a_fraction_of_the_time_of_torchs():
    program = (
        "import time\n"
        "start = time.perf_counter(); import torch\n"
        "middle = time.perf_counter(); import overspill\n"
        "print((time.perf_counter() - middle) / (middle - start))"
    )
    # The best of three: another process may take the core in the middle of one.
    assert min(float(printed_by(program)) for _ in range(3)) < 0.5
