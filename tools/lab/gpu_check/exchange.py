"""An actor's refresh on the device: a twin is loaded while the model computes, then their contents are exchanged."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from slipstream.actors.engine.exchange import exchange, pieces_of, tensors_of
from slipstream.actors.engine.twin import twin_of
from slipstream.actors.weights.weights_memory import WeightsMemory
from slipstream.tools.lab.gpu_check.findings import Findings
from slipstream.tools.lab.gpu_check.shape import QWEN

REDUCED = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1024}
MIB = 1 << 20
PIECES_MIB = (4, 16, 64, 256)
REPEATS = 3
COMPUTE_S = 1.0  # of multiplications that are in the queue while the twin is loaded
SIDE = 8192  # of their matrices


class Layer(nn.Module):
    """The weights of one layer as vLLM has them: merged projections, in bfloat16."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        hidden, middle = shape["hidden_size"], shape["intermediate_size"]
        keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
        sizes: dict[str, tuple[int, ...]] = {"qkv": (hidden + 2 * keys, hidden), "out": (hidden, hidden)}
        sizes |= {"gate_up": (2 * middle, hidden), "down": (hidden, middle), "norm": (hidden,), "bias": (keys,)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size, dtype=torch.bfloat16), requires_grad=False))


class Weights(nn.Module):
    """A whole model, whose output layer is its embedding."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape["vocab_size"], shape["hidden_size"], dtype=torch.bfloat16).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape["num_hidden_layers"]))
        self.head = nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


def check(findings: Findings, device: str) -> None:
    """Load, exchange and exchange back, each with its time; a CUDA graph must compute with what was exchanged."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Weights(QWEN | REDUCED if device == "cpu" else QWEN)
        twin = twin_of(model)
    old = _on_host(model)
    memory = WeightsMemory(device=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None)
    new = _received(memory, old)
    num_bytes = memory.flat.nbytes
    findings.note("bytes of the weights", num_bytes / 1e9, "GB")
    _load(findings, twin, new, num_bytes, pinned=False)
    if device == "cuda":
        _pin(findings, memory)
        _load(findings, twin, new, num_bytes, pinned=True)
    replay = _graph(model) if device == "cuda" else None
    _exchange(findings, model, twin, num_bytes)
    findings.require("an odd number of exchanges gives the model the new weights", _same(model, new))
    findings.require("and its twin the old ones", _same(twin, old))
    if replay is not None:
        findings.require("a CUDA graph from before computes with the new weights", replay())
    memory.pinning.end()
    exchange(pieces_of(model, twin))
    findings.require("one more gives them back", _same(model, old) and _same(twin, new))


def _on_host(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors_of(model).items()}


def _received(memory: WeightsMemory, old: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random tensors as an actor receives them: in one flat buffer, each once."""
    once = {name: tensor for name, tensor in old.items() if name != "head.weight"}
    memory.resize(sum(tensor.nbytes for tensor in once.values()))
    parts = torch.split(memory.flat, [tensor.nbytes for tensor in once.values()])
    new = {
        name: part.view(torch.bfloat16).view(tensor.shape)
        for (name, tensor), part in zip(once.items(), parts, strict=True)
    }
    for tensor in new.values():
        tensor.copy_(torch.randn(tensor.shape))
    return new | {"head.weight": new["embed.weight"]}


def _pin(findings: Findings, memory: WeightsMemory) -> None:
    started = time.perf_counter()
    for _ in range(2):  # it is pinned at its second use
        memory.pinning.used(memory.flat)
    pages = memory.pinning.pages
    assert pages is not None
    findings.require("CUDA settles within a minute whether it pins what an actor received", pages.settled.wait(60))
    findings.note("pinned", pages.num_bytes / 1e9 / (time.perf_counter() - started), "GB/s")
    findings.require("CUDA pinned all of it", pages.num_bytes >= memory.flat.nbytes, f"{pages.num_bytes} bytes")


def _same(model: nn.Module, values: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor.cpu(), values[name]) for name, tensor in tensors_of(model).items())


def _load(findings: Findings, twin: nn.Module, values: dict[str, Tensor], num_bytes: int, *, pinned: bool) -> None:
    """Copy `values` to the twin on a stream of its own, while the default one is busy."""
    what, on_gpu = "pinned memory" if pinned else "pageable memory", twin.get_parameter("embed.weight").is_cuda
    stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
    computed = _busy() if on_gpu else None
    started = time.perf_counter()
    with torch.cuda.stream(stream) if stream else nullcontext():
        for name, tensor in tensors_of(twin).items():
            if name != "head.weight":
                tensor.data.copy_(values[name])
    if stream is not None:
        stream.synchronize()
    seconds = time.perf_counter() - started
    findings.note(f"load from {what}, beside computation", num_bytes / 1e9 / seconds, "GB/s")
    if pinned and computed is not None:  # from pageable memory it may take longer than the computation
        findings.require("the load does not wait for what is computed", not computed())
    findings.require(f"the load from {what} is exact", _same(twin, values))


def _busy() -> Callable[[], bool]:
    """Queue multiplications on the default stream for about COMPUTE_S; the result says whether they have ended."""
    matrix = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    once_s = _seconds(lambda: torch.mm(matrix, matrix))
    ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
    for _ in range(max(1, min(800, int(COMPUTE_S / once_s)))):  # CUDA's queue has room for about 1,000
        torch.mm(matrix, matrix)
    ended.record()
    return lambda: bool(ended.query())  # type: ignore[no-untyped-call]


def _seconds(run: Callable[[], object]) -> float:
    """The time of the second of two runs, to its end on the device."""
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return seconds


def _exchange(findings: Findings, model: nn.Module, twin: nn.Module, num_bytes: int) -> None:
    """Time exchanges with temporaries of several sizes; an odd number of them all together."""
    for mib in PIECES_MIB:
        pieces = pieces_of(model, twin, piece_bytes=mib * MIB)
        seconds = min(_seconds(partial(exchange, pieces)) for _ in range(REPEATS))
        findings.note(f"exchange by pieces of {mib} MiB", 1e3 * seconds, "ms")
        findings.note(f"exchange by pieces of {mib} MiB: a set of weights at", num_bytes / 1e9 / seconds, "GB/s")
    exchange(pieces)


def _graph(model: nn.Module) -> Callable[[], bool]:
    """Capture a multiplication by the head; the result replays it, and says whether it used the present weights."""
    weight = model.get_parameter("head.weight")
    inputs = torch.randn(4, weight.shape[1], device="cuda", dtype=torch.bfloat16)
    torch.mm(inputs, weight.t())  # cuBLAS must be initialised before a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = torch.mm(inputs, weight.t())

    def replay() -> bool:
        graph.replay()
        torch.cuda.synchronize()
        return torch.equal(outputs, torch.mm(inputs, weight.t()))

    return replay
