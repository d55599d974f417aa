"""The Python side of ``torch.cuda``: what a CUDA build of torch implements in C++ for its Python functions."""

from __future__ import annotations

import atexit
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d as c10d

GIBIBYTE = 1 << 30
NARROW = 16
"""``petra.models.layers.NARROW``. Importing petra here would import it before a test sets its environment."""


class Stream(torch.Stream):
    """A stream of the emulated device, with the interface of ``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Stream:
        if "stream_id" in ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device("cuda", index_of(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event(Event()))


class Event(torch.Event):
    """An event of the emulated device, with the interface of ``torch.cuda.Event``."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, other: Event) -> float:  # that of torch.Event refuses subclasses
        return float(_extension.elapsed(self.event_id, other.event_id))


_extension: Any = None


def index_of(device: Any = None) -> int:
    """Return the index of a device, which may be given as None, a number, a string or a torch.device."""
    if device is None or (isinstance(device, int) and device < 0):
        return int(_extension.current_device())
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return int(_extension.current_device()) if found.index is None else found.index


def install(extension: Any, devices: int) -> None:
    """Replace the functions of ``torch.cuda`` that need a CUDA build, and ProcessGroupNCCL by the emulated process group."""
    global _extension
    _extension = extension
    cuda = torch.cuda
    replaced = {
        **_device_functions(extension, devices),
        **_stream_functions(extension),
        **_memory_functions(extension),
        "default_generators": tuple(extension.default_generator(i) for i in range(devices)),
    }
    for name, value in replaced.items():
        original = getattr(cuda, name, None)
        for module in (cuda, cuda.memory, cuda.random, cuda.streams):
            if module is cuda or (original is not None and getattr(module, name, None) is original):
                setattr(module, name, value)
    torch.storage._StorageBase.to = _storage_to
    torch.nn.functional.conv2d = _conv2d
    cuda.nccl.version = lambda: (2, 27, 0)
    torch._C._cuda_getCurrentRawStream = lambda device: extension.current_stream(device)
    torch._C._host_emptyCache = lambda: None
    c10d._NCCL_AVAILABLE = True
    for module in (c10d, torch.distributed):
        module.is_nccl_available = lambda: True
        module.ProcessGroupNCCL = extension.ProcessGroupNCCL
    atexit.register(extension.shut_down)


_original_storage_to = torch.storage._StorageBase.to


def _storage_to(self: Any, *, device: torch.device, non_blocking: bool = False) -> Any:
    """Move a storage; the C++ constructor of a storage knows no CUDA in a CPU build."""
    if torch.device(device).type != "cuda":
        return _original_storage_to(self, device=device, non_blocking=non_blocking)
    target = torch.empty(self.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    return target.copy_(self, non_blocking)


_original_conv2d = torch.nn.functional.conv2d


def _conv2d(x: Any, weight: Any, bias: Any = None, stride: Any = 1, *others: Any, **options: Any) -> Any:
    """Convolve. The emulated device convolves on the CPU, so it needs what ``petra.models.layers.StridedPointwise`` does there.

    Without it, the gradient of a narrow strided 1x1 convolution in channels-last format corrupts memory on processors without
    AVX-512.
    """
    rows, columns = (stride, stride) if isinstance(stride, int) else stride
    narrow = weight.shape[1] < NARROW and tuple(weight.shape[2:]) == (1, 1) and not (x.is_contiguous() and weight.shape[1] > 1)
    if x.device.type != "cuda" or not narrow or rows * columns == 1:
        return _original_conv2d(x, weight, bias, stride, *others, **options)
    return _original_conv2d(x[..., ::rows, ::columns], weight, bias, 1, *others, **options)


def _device_functions(extension: Any, devices: int) -> dict[str, Any]:
    def exchange(device: int) -> int:
        before = extension.current_device()
        if device >= 0:
            extension.set_device(device)
        return int(before)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "device_count": lambda: devices,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(index_of(device)),
        "_exchange_device": exchange,
        "_maybe_exchange_device": lambda device: exchange(device),  # torch.compile wants two functions
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "emulated",
        "get_device_properties": _properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "can_device_access_peer": lambda device, peer: True,
    }


def _stream_functions(extension: Any) -> dict[str, Any]:
    def stream(identifier: int, device: int) -> Stream:
        return Stream(stream_id=identifier, device_index=device, device_type=1)

    def synchronize(device: Any = None) -> None:
        torch._C._accelerator_synchronizeDevice(index_of(device))

    return {
        "Stream": Stream,
        "Event": Event,
        "synchronize": synchronize,
        "current_stream": lambda device=None: stream(extension.current_stream(index_of(device)), index_of(device)),
        "default_stream": lambda device=None: stream(0, index_of(device)),
        "set_stream": lambda stream: extension.set_stream(stream.stream_id, stream.device_index),
        "is_current_stream_capturing": lambda: False,
        "_sleep": extension.sleep,
    }


def _memory_functions(extension: Any) -> dict[str, Any]:
    keys = {"memory_allocated": "allocated", "memory_reserved": "reserved"}
    keys |= {f"max_{name}": f"{key}_peak" for name, key in keys.items()}
    return {
        **{name: lambda device=None, key=key: extension.usage(index_of(device))[key] for name, key in keys.items()},
        "memory_stats_as_nested_dict": _memory_stats,
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak(index_of(device)),
        "empty_cache": extension.empty_cache,
        "mem_get_info": lambda device=None: (80 * GIBIBYTE - extension.usage(index_of(device))["reserved"], 80 * GIBIBYTE),
    }


def _memory_stats(device: Any = None) -> dict[str, Any]:
    used = _extension.usage(index_of(device))

    def stat(key: str) -> dict[str, dict[str, int]]:
        return {"all": {"current": used[key], "peak": used[f"{key}_peak"], "allocated": used[key], "freed": 0}}

    return {"allocated_bytes": stat("allocated"), "reserved_bytes": stat("reserved"), "num_alloc_retries": 0, "num_ooms": 0}


def _properties(device: Any = None) -> SimpleNamespace:
    uuid = f"GPU-emulated-{os.environ.get('GROUP_RANK', 0)}-{index_of(device)}"  # agents on one host stand for machines
    size = {"total_memory": 80 * GIBIBYTE, "multi_processor_count": 132}
    return SimpleNamespace(name="emulated", major=9, minor=0, uuid=uuid, **size)
