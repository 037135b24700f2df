"""What of torch.cuda and of Triton is replaced while a fake device is there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from tests.fake_gpu.device import LEAST_S, _quiet, _Recording, properties, replaced

if TYPE_CHECKING:
    from tests.fake_gpu.device import FakeGpu


def patches(gpu: FakeGpu) -> list[AbstractContextManager[Any]]:
    """Everything, in the order in which it is put on."""
    started = SimpleNamespace(value=False)

    def index(device: Any = None) -> int:
        started.value = True
        if device is None:
            return gpu.current
        if isinstance(device, int):
            return device
        named = torch.device(device)
        return gpu.current if named.index is None else named.index

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            made = super().__new__(cls)
            if torch.device(device).type == "cuda":
                gpu._generators.append(made)
            return made

    class Event(_Event):
        def __init__(self, enable_timing: bool = False, **others: Any) -> None:
            super().__init__(gpu, enable_timing)

    class Stream:
        def __init__(self, device: Any = None, **others: Any) -> None:
            self.device = torch.device("cuda", index(device))
            self.cuda_stream = 1

        def wait_stream(self, other: Any) -> None:
            """One clock for all streams."""

        def wait_event(self, event: Any) -> None:
            """One clock for all streams."""

        def synchronize(self) -> None:
            gpu.wait()

    class Graph(_Graph):
        def __init__(self, *others: Any, **more: Any) -> None:
            super().__init__(gpu)

    current = Stream()

    def set_device(device: Any) -> None:
        gpu.current = index(device)

    @contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before, gpu.current = gpu.current, index(device)
        try:
            yield
        finally:
            gpu.current = before

    def empty_cache() -> None:
        for each in range(gpu.devices):
            gpu.reserved[each] = gpu._used[each] + (300 << 20)

    def reset_peak(device: Any = None) -> None:
        gpu.peak[index(device)] = gpu._used[index(device)]

    run_thread = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with gpu.modes():
            run_thread(thread)

    nvtx = SimpleNamespace(range=lambda label: nullcontext(), range_push=lambda label: 0, range_pop=lambda: 0)
    replacements = [
        replaced(
            torch.cuda,
            is_available=lambda: True,
            is_initialized=lambda: started.value,
            _lazy_init=lambda: None,
            device_count=lambda: gpu.devices,
            current_device=lambda: gpu.current,
            set_device=set_device,
            device=on_device,
            get_device_name=lambda device=None: gpu.name,
            get_device_capability=lambda device=None: gpu.capability,
            get_device_properties=lambda device=None: properties(gpu),
            mem_get_info=lambda device=None: (gpu.free_bytes(index(device)), gpu.memory_bytes),
            memory_allocated=lambda device=None: gpu.allocated[index(device)],
            max_memory_allocated=lambda device=None: gpu.peak[index(device)],
            reset_peak_memory_stats=reset_peak,
            empty_cache=empty_cache,
            synchronize=lambda device=None: gpu.wait(),
            Event=Event,
            Stream=Stream,
            current_stream=lambda device=None: current,
            stream=lambda stream: nullcontext(),
            CUDAGraph=Graph,
            graph=_graph(gpu),
            graph_pool_handle=lambda: (0, 1),
            is_current_stream_capturing=lambda: gpu.recording is not None,
            nvtx=nvtx,
        ),
        replaced(torch, Generator=Generator),
        replaced(threading.Thread, run=run),
    ]
    return [*replacements, *_absent(), *_triton_patches(gpu)]


def _absent() -> list[AbstractContextManager[Any]]:
    """What cannot be stood in for: PyTorch's own FlashAttention (before 2.12 it has no pages) and compiled flex."""
    from executor.attention.flex import FlexAttention

    varlen = ModuleType("torch.nn.attention.varlen")
    varlen.varlen_attn_out = lambda out, query: None  # type: ignore[attr-defined]
    why_not = classmethod(lambda cls, *asked: "the fake device compiles nothing with Inductor")
    return [mock.patch.dict(sys.modules, {varlen.__name__: varlen}), replaced(FlexAttention, why_not=why_not)]


class _Event:
    def __init__(self, gpu: FakeGpu, timed: bool) -> None:
        self._gpu, self._timed, self._at_ns = gpu, timed, 0

    def record(self, stream: Any = None) -> None:
        if self._gpu.recording is None:
            self._at_ns = max(self._gpu._end_ns, self._gpu.now_ns())

    def query(self) -> bool:
        return self._gpu.now_ns() >= self._at_ns

    def synchronize(self) -> None:
        self._gpu.wait()

    def wait(self, stream: Any = None) -> None:
        """One clock for all streams."""

    def elapsed_time(self, end: _Event) -> float:
        if not (self._timed and end._timed and self._at_ns and end._at_ns):
            raise ValueError("Both events must be recorded, with timing, before calculating elapsed time")
        if not end.query():
            raise RuntimeError("CUDA error: device not ready")
        return (end._at_ns - self._at_ns) / 1e6


class _Graph:
    """A captured graph. With numbers it computes again, without it only takes its time."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.recorded: _Recording | None = None

    def replay(self) -> None:
        gpu, recorded = self._gpu, self.recorded
        assert recorded is not None
        if any(not block.alive for block in recorded.outside):
            raise RuntimeError("CUDA error: an illegal memory access was encountered (a graph's memory is gone)")
        gpu.counts.replays += 1
        gpu.spend(recorded.seconds)
        with _quiet(), torch.inference_mode():
            for call in recorded.calls:
                call()

    def pool(self) -> Any:
        return (0, 1)


def _graph(gpu: FakeGpu) -> Callable[..., AbstractContextManager[None]]:
    @contextmanager
    def capture(graph: _Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        gpu.wait()
        graph.recorded = gpu.recording = _Recording()
        gpu.counts.captures += 1
        try:
            yield
        finally:
            gpu.recording = None

    return capture


# Triton


def _triton_patches(gpu: FakeGpu) -> list[AbstractContextManager[Any]]:
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        return []
    plain = InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        launch(gpu, kernel, args, grid, options)

        def compute() -> None:
            with _quiet():
                plain(kernel, *args, grid=grid, warmup=warmup, **options)

        if gpu.computes and isinstance(kernel, InterpretedFunction):
            compute()
            if gpu.recording is not None:
                gpu.recording.calls.append(compute)
                gpu.recording.kept.append(args)

    return [replaced(InterpretedFunction, run=run), replaced(JITFunction, run=run)]


class _Pointer:
    """A tensor as Triton's launcher looks at it."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        address = tensor.storage_offset() * tensor.element_size()
        self._address = (1 << 40) + address  # allocations are aligned to 512 bytes

    def data_ptr(self) -> int:
        return self._address


_BINDERS: dict[Any, Any] = {}


def launch(gpu: FakeGpu, kernel: Any, args: Any, grid: Any, options: dict[str, Any]) -> None:
    """Check a launch by Triton's own rules of specialisation; a new variant is counted, and compiled if asked for."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    capability = 10 * gpu.capability[0] + gpu.capability[1]
    if (kernel, capability) not in _BINDERS:
        compiled = kernel
        if not isinstance(kernel, JITFunction):
            kept = {key: kernel.kwargs.get(key) for key in ("do_not_specialize", "do_not_specialize_on_alignment")}
            compiled = JITFunction(kernel.fn, **kept)
        backend = make_backend(GPUTarget("cuda", capability, 32))
        binder = create_function_from_signature(compiled.signature, compiled.params, backend)
        _BINDERS[kernel, capability] = compiled, backend, binder
    compiled, backend, binder = _BINDERS[kernel, capability]
    tensors = [each for each in [*args, *options.values()] if isinstance(each, Tensor)]
    name = compiled.fn.__name__
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            if not gpu.holds(tensor):
                raise ValueError(f"{name}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
            if gpu.index_of(tensor) != gpu.current:
                raise RuntimeError(
                    f"{name}: Triton launches on the current device cuda:{gpu.current}, a tensor lies on "
                    f"cuda:{gpu.index_of(tensor)}: CUDA error: an illegal memory access was encountered"
                )
        pointers = [_Pointer(each) if isinstance(each, Tensor) else each for each in args]
        gpu.touch(tensors)
    grid = grid if isinstance(grid, tuple) else (grid,)
    programs = 1
    for length in grid:
        if not 0 < int(length) <= 2**31 - 1:
            raise RuntimeError(f"{name}: Triton Error [CUDA]: invalid argument (grid {grid})")
        programs *= int(length)
    if any(int(length) > 65535 for length in grid[1:]):
        raise RuntimeError(f"{name}: Triton Error [CUDA]: invalid argument (grid {grid})")
    bound, specialisation, rest = binder(*pointers, **options)
    key = (name, str(specialisation), str(sorted(rest.items())))
    if key not in gpu.variants:
        gpu.variants[key] = name
        gpu.counts.compiled += 1
        if gpu.recording is not None:
            raise RuntimeError(f"{name}: compiled while a graph is captured (loading a module is not permitted)")
        if gpu.compiles:
            _compile(gpu, compiled, backend, options, bound, specialisation, capability)
    gpu.spend(LEAST_S + programs * 4e-7 / gpu.processors)


def _compile(
    gpu: FakeGpu, kernel: Any, backend: Any, options: dict[str, Any], bound: Any, specialisation: Any, capability: int
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.errors import OutOfResources

    known = {key: value for key, value in options.items() if key not in bound}
    parsed, signature, constants, attributes = kernel._pack_args(backend, known, bound, specialisation, known)
    source = ASTSource(kernel, signature, constants, attributes)
    with _quiet():
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=parsed.__dict__)
    most = properties(gpu).shared_memory_per_block_optin
    if built.metadata.shared > most:
        raise OutOfResources(built.metadata.shared, most, "shared memory")
