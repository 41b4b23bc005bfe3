"""Replaces the streams, events and queries of torch.cuda, and torch.compile, by stand-ins that record waits.

A compiled function runs as it is, and is logged as one kernel that writes its outputs: what a
compiler that fuses everything would make of it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # lists the functions of torch.cuda, so before they are replaced
from torch import Tensor
from torch._higher_order_ops.wrap import InductorCompiledCallable, inductor_compiled_code
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import _disable_current_modes

from tests.fake_cuda.operators import OperatorLog

GPUS = 8  # of this machine
_now = [0]  # increases with each recording of an event
_elapsed = [0]  # calls of elapsed_time in this step


def log() -> OperatorLog | None:
    """The log that is active."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, OperatorLog)), None)


def waits(what: str) -> None:
    """The host waits for the device."""
    if (active := log()) is not None:
        active.add(what, waits=what)


class Event:
    """torch.cuda.Event. The wait for one that was recorded during an earlier step is logged as such."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self.step = -1

    def record(self, _stream: Any = None) -> "Event":
        self.step = _now[0]
        return self

    def synchronize(self) -> None:
        if self.step >= 0:
            waits(f"waits for an event of {'this step' if self.step == _now[0] else 'the step before'}")

    def elapsed_time(self, end: "Event") -> float:
        """In milliseconds. It fails on events that the host has not waited for."""
        active = log()
        assert active is None or [one.waits for one in active.waits][-1:] == ["waits for an event of the step before"]
        assert self.step == end.step == _now[0] - 1
        _elapsed[0] += 1
        return 1.0


def next_step() -> None:
    """Events recorded until now belong to an earlier step."""
    _now[0] += 1
    _elapsed[0] = 0


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, _stream: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record()

    def synchronize(self) -> None:
        waits("waits for a stream")


REGISTERED: dict[int, int] = {}  # page-locked by the runtime: bytes, by address
RUNTIME = SimpleNamespace(  # torch.cuda.cudart()
    cudaError=type("cudaError", (int,), {"success": 0}),
    cudaGetErrorString=lambda error: f"error {int(error)}",
    cudaHostRegister=lambda address, n_bytes, _flags: REGISTERED.update({address: n_bytes}) or 0,
    cudaHostUnregister=lambda address: REGISTERED.pop(address) and 0,
)
_current = [Stream()]


@contextlib.contextmanager
def stream(inside: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    if inside is not None:
        _current.append(inside)
    try:
        yield
    finally:
        if inside is not None:
            _current.pop()


def current_stream(_device: Any = None) -> Stream:
    return _current[-1]


def pin_memory(tensor: Tensor, _device: Any = None) -> Tensor:
    """Tensor.pin_memory, also of a FakeTensor."""
    if torch._subclasses.fake_tensor.is_fake(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return _real_pin_memory(tensor)


_real_pin_memory = Tensor.pin_memory


def compile_(function: Any = None, **options: Any) -> Any:
    """torch.compile."""
    if function is None:
        return functools.partial(compile_, **options)
    if function is flex_attention:
        return functools.partial(_flex_attention, bool((options.get("options") or {}).get(_WRAP)))

    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        if (active := log()) is None:
            return function(*args, **kwargs)
        return active.compiled(function.__name__, function, args, kwargs)

    return compiled


_WRAP, _FORWARD = "wrap_inductor_compiled_regions", "flex_attention forward"


def _flex_attention(
    wrap: bool, q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any = None, enable_gqa: bool = False
) -> Tensor:
    """FlexAttention as Inductor compiles it: a kernel forward and one backward, both invisible to dispatch modes, as
    selective checkpointing is one; with the option _WRAP, forward is an operator that they see.
    """
    assert q.shape[1] == k.shape[1] or enable_gqa
    return _FlexAttention.apply(wrap, q, k, v, *block_mask.as_tuple()[2:10])[0]  # type: ignore[no-untyped-call]


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wrap: bool, q: Tensor, k: Tensor, v: Tensor, *blocks: Any) -> tuple[Tensor, Tensor]:
        inputs = [q, k, v, *(t for t in blocks if isinstance(t, Tensor))]
        if wrap:
            out, logsumexp = inductor_compiled_code(_region(), inputs, name=_FORWARD)
        elif (active := log()) is not None:
            with _disable_current_modes():
                out, logsumexp = active.compiled(_FORWARD, _kernel, inputs, {})
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.mark_non_differentiable(logsumexp)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, *others = ctx.saved_tensors
        inputs = [q, k, v, *others, grads[0]]
        with _disable_current_modes():
            found = [torch.empty_like(t) for t in (q, k, v)]
        if (active := log()) is not None:
            active.compiled("flex_attention backward", lambda *_: found, inputs, {})
        return None, *found, *[None] * (len(ctx.needs_input_grad) - 4)


@functools.cache
def _region() -> InductorCompiledCallable:
    return InductorCompiledCallable(_kernel, _kernel, _FORWARD)


def _kernel(q: Tensor, k: Tensor, v: Tensor, *_blocks: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _random_state(_device: Any = None) -> Tensor:
    with _disable_current_modes():
        return torch.zeros(16, dtype=torch.uint8)


def install() -> None:
    """Replace them, for the rest of this process."""
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    replaced: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "cudart": lambda: RUNTIME,
        "_cudart": RUNTIME,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": lambda _=None: _current[0],
        "synchronize": lambda _=None: waits("waits for the device"),
        "set_device": nothing,
        "current_device": lambda: 0,
        "device_count": lambda: GPUS,
        "is_initialized": lambda: True,
        "_lazy_init": nothing,
        "get_device_name": lambda _=None: "NVIDIA H100 80GB HBM3",
        "get_device_capability": lambda _=None: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": _random_state,
        "set_rng_state": nothing,
        "max_memory_allocated": lambda _=None: 0,
        "reset_peak_memory_stats": nothing,
    }
    for name, stand_in in replaced.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, stand_in)
    torch.accelerator.current_stream = current_stream  # type: ignore[assignment]
    torch.backends.cuda.is_flash_attention_available = lambda: True
    Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    torch.compile = compile_  # type: ignore[assignment]
