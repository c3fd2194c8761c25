"""What the simulated run leaves out."""

from types import SimpleNamespace
from typing import Any

import pytest

from simulated_gpu.plugin import pytest_collection_modifyitems

pytestmark = pytest.mark.gpu


def test_what_only_hardware_can_show_is_left_out_and_nothing_else() -> None:
    told: list[Any] = []
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: told.extend(items)))
    plain, marked = (
        SimpleNamespace(get_closest_marker=lambda name, names=names: name in names or None)
        for names in ({"gpu"}, {"gpu", "real_gpu"})
    )
    items: list[Any] = [plain, marked]
    pytest_collection_modifyitems(config, items)
    assert items == [plain]
    assert told == [marked]


def test_nothing_of_it_is_in_this_run(request: pytest.FixtureRequest) -> None:
    assert not [item for item in request.session.items if item.get_closest_marker("real_gpu")]
