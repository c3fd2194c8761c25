"""Puts the simulated device in the place of CUDA: the library before torch is imported, then what torch.cuda lacks."""

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from simulated_gpu.build import NAME, CannotSimulateError, built


def is_installed() -> bool:
    """Whether this process has the simulated device."""
    return NAME in sys.modules


def longest_delay() -> int:
    """In microseconds: one in 16 of the things queued begins late, by up to so much."""
    return int(os.environ.get("SIMULATED_DELAY", "0"))


@contextmanager
def delayed(longest: int) -> Iterator[None]:
    """Within, another longest delay; one of any length has all be queued, and nothing be done at once."""
    device = sys.modules[NAME]
    device.delay(longest)
    try:
        yield
    finally:
        device.delay(longest_delay())


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the timed device does in a second: an H200's figures, with kernels as fast as they mostly are."""

    link: float = 55e9
    """Bytes between host and device, in each direction."""
    memory: float = 3.3e12
    """Bytes that kernels read and write."""
    products: float = 780e12
    """Operations of matrix products in bf16."""
    attention: float = 700e12
    attention_backward: float = 650e12
    launch: float = 2e-6
    """Not a rate: what each kernel takes beside, in seconds."""

    def times(self, factor: float) -> "Rates":
        """Of a device that is so much faster: what a slow host is beside it can be seen."""
        rates = {name: rate * factor for name, rate in asdict(self).items()}
        return Rates(**{**rates, "launch": self.launch / factor})


def install() -> None:
    """Have the device that computes from now on, in this process."""
    if not is_installed():
        _install("computing").delay(longest_delay())


def install_timed(rates: Rates) -> None:
    """Have the one that computes nothing, and takes its time."""
    assert not is_installed(), "torch can have one of them"
    _install("timed").set_rates(**asdict(rates))


def _install(kind: str) -> Any:
    if "torch" in sys.modules:
        raise CannotSimulateError(
            "torch is imported already, and has asked which devices there are. The simulated one comes first: "
            "PYTHONPATH=src:tests python -m pytest -p simulated_gpu.plugin"
        )
    library = str(built(kind))
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # registers the device
    loader = importlib.machinery.ExtensionFileLoader(NAME, library)
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    import torch

    device = importlib.util.module_from_spec(spec)
    loader.exec_module(device)
    sys.modules[NAME] = device
    _show(torch, device)
    return device


def _show(torch: Any, device: ModuleType) -> None:
    """A torch without CUDA has all of torch.cuda, but nothing below it."""
    for names, values in ((torch.cuda, _cuda(torch, device)), (torch._C, _private(device))):
        for name, value in values.items():
            setattr(names, name, value)
    _storage_class(torch)
    torch.cuda.memory.empty_cache = device.empty_cache  # who imported it from there
    torch.backends.cuda.is_built = lambda: True
    torch.backends.cudnn.enabled = False  # else torch asks for it, and warns that there is none


def _cuda(torch: Any, device: ModuleType) -> dict[str, object]:
    """What is shown as torch.cuda."""
    generator = device.default_generator()
    total = device.total_memory()
    properties = SimpleNamespace(name="simulated", total_memory=total, multi_processor_count=1, major=9, minor=0)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # else torch's checkpoint leaves random numbers alone
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        # Streams and events.
        "Stream": _class("Stream", lambda cls, device=None, priority=0: torch.Stream(device="cuda:0")),
        "Event": _class("Event", lambda cls, **options: torch.Event(device="cuda:0", **options)),
        "stream": lambda stream: stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(0),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=0, device_type=1),
        "synchronize": lambda device=None: torch.accelerator.synchronize(0),
        "is_current_stream_capturing": lambda: False,
        "_sleep": device.sleep,
        # Memory.
        "memory_allocated": lambda of=None: device.memory_allocated(),
        "max_memory_allocated": lambda of=None: device.max_memory_allocated(),
        "memory_reserved": lambda of=None: device.memory_reserved(),
        "max_memory_reserved": lambda of=None: device.max_memory_reserved(),
        "reset_peak_memory_stats": lambda of=None: device.reset_peak_memory_stats(),
        "mem_get_info": lambda of=None: (total - device.memory_reserved(), total),
        "empty_cache": device.empty_cache,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: device.pin(address, nbytes),
            cudaHostUnregister=device.unpin,
            cudaGetErrorString=lambda code: f"error {code}",
        ),
        # Random numbers.
        "default_generators": (generator,),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "manual_seed": lambda seed: _nothing(generator.manual_seed(seed)),
        "manual_seed_all": lambda seed: _nothing(generator.manual_seed(seed)),
    }


def _private(device: ModuleType) -> dict[str, object]:
    """What a torch without CUDA does not define, and others call or import."""
    return {
        "_cuda_getCurrentRawStream": lambda index: device.current_stream(),
        "_cuda_getDevice": lambda: 0,
        "_cuda_exchangeDevice": lambda index: 0,
        "_cuda_maybeExchangeDevice": lambda index: 0,
        # Of CUDA graphs: torch.compile imports them, and uses none.
        "_cuda_CUDAAllocator_AllocatorState": object,
        "_set_cached_tensors_enabled": lambda enabled: None,
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": None,
    }


def _storage_class(torch: Any) -> None:
    """Let storages be made on the device, as copies of tensors are. Torch's own constructor knows its build's alone."""
    plain = torch._C.StorageBase.__new__

    def new(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return plain(cls, *args, **options, **({} if device is None else {"device": device}))
        return torch.empty(*args, dtype=torch.uint8, device="cuda:0").untyped_storage()

    torch.UntypedStorage.__new__ = new
    torch.UntypedStorage.__init__ = lambda self, *args, **options: None  # object's, which refuses what `new` took


def _class(name: str, new: Any) -> type:
    """A class, since annotations name it, whose instances are what `new` makes."""
    return type(name, (), {"__new__": new})


def _nothing(_: object) -> None:
    pass
