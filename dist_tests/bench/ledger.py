# SPDX-License-Identifier: Apache-2.0
"""What one compiled layer saves between its forward and its backward, tensor by tensor."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx, nn
from torch._functorch.partitioners import get_default_op_list
from torch._inductor.compile_fx import compile_fx
from torch.fx.node import map_arg

# where it is counted: made by the layer; given by its caller (x, tables of positions); its weights
COMPUTED, GIVEN, PARAMETER = "computed", "given", "parameter"


@dataclass(frozen=True)
class Saved:
    """A tensor that the backward reads. writer: the operator that wrote it; source: the layer in
    which it was written, or "" if torch does not tell."""

    kind: str
    name: str
    writer: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes


@dataclass
class Captured:
    """The graphs of one layer as the partitioner cut them; nothing of them runs."""

    forward: fx.Graph | None = None
    backward: fx.Graph | None = None
    static: frozenset[int] = frozenset()  # positions of parameters among the forward's inputs

    def backend(self, module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        """A backend of torch.compile: inductor's passes and cut, results without values."""
        return compile_fx(module, inputs, inner_compile=self._keep)

    def _keep(self, module: fx.GraphModule, inputs: Sequence, **facts) -> Callable:
        if facts.get("is_backward"):
            self.backward = module.graph
        else:
            self.forward = module.graph
            self.static = frozenset(facts.get("static_input_idxs") or ())
        results = _results(module.graph)

        def run(inputs: list) -> list:
            inputs.clear()
            return [_empty(of.meta["val"]) if isinstance(of, fx.Node) else of for of in results]

        run._boxed_call = True
        return run


def capture(layer: nn.Module, run: Callable[[], Tensor]) -> Captured:
    """The graphs of `layer`, which is compiled here, in a forward and a backward of `run()`."""
    torch._dynamo.reset()
    captured = Captured()
    layer.compile(backend=captured.backend)
    run().sum().backward()
    return captured


@contextlib.contextmanager
def on_gpu(arch: str = "sm_90a") -> Iterator[None]:
    """Graphs hold the operators of a GPU of this architecture, on a machine without one."""
    if torch.cuda.is_available():
        yield
        return
    from dist_tests.single import hopper

    with hopper.emulated(arch):
        yield


def saved(captured: Captured) -> list[Saved]:
    """What the forward hands to the backward, each memory once, largest first."""
    graph = captured.forward
    assert graph is not None, "the layer was not compiled"
    outputs = [n for n in _results(graph) if isinstance(n, fx.Node)]
    counts = _forward_results(captured)
    positions = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    found: dict[fx.Node, Saved] = {}
    for node in outputs[counts:]:
        memory = _memory(node)
        value = memory.meta["val"]
        if not isinstance(value, Tensor) or memory in found:
            continue
        kind = COMPUTED
        if memory.op == "placeholder":
            kind = PARAMETER if positions[memory] in captured.static else GIVEN
        found[memory] = Saved(
            kind,
            memory.name,
            _writer(memory),
            _source(memory),
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            _bytes(value),
        )
    return sorted(found.values(), key=lambda s: -s.size)


def quantizing_bytes(graph: fx.Graph | None, tokens: int) -> int:
    """Bytes of activations and gradients that quantizing moves in a graph: what operators of codes
    read and write, and each operand that is written for them alone."""
    moved, alone = 0, set()
    for node in graph.nodes if graph is not None else ():
        if "quantize" not in _writer(node) or node.target is operator.getitem:
            continue
        read: list[fx.Node] = []
        map_arg((node.args, node.kwargs), read.append)
        results = [n for n in node.users if n.target is operator.getitem] or [node]
        for n in read + results:
            moved += _bytes(n.meta["val"]) if _has_tokens(n, tokens) else 0
        for n in map(_memory, read):
            is_alone = all("quantize" in _writer(u) or _is_reduced(u) for u in _users(n))
            if n.op != "placeholder" and is_alone and _fuses(n) and _has_tokens(n, tokens):
                alone.add(n)
    return moved + sum(_bytes(n.meta["val"]) for n in alone)


def lines(name: str, rows: Iterable[Saved], width: int, tokens: int) -> Iterator[str]:
    """A table: bytes per token and element of `width`; small tensors are summed."""
    unit, small = width * tokens, 0
    yield f"\n{name}: bytes per token and element of width {width}"
    for row in rows:
        if row.kind is PARAMETER or row.size < 0.005 * unit:
            small += row.size if row.kind is not PARAMETER else 0
            continue
        kind = "" if row.kind is COMPUTED else f" ({row.kind})"
        shape = "x".join(map(str, row.shape))
        yield (
            f"{row.size / unit:9.3f}  {row.dtype:9} {shape:22} {row.writer} of "
            f"{row.source or 'the layer'}{kind}"
        )
    yield f"{small / unit:9.3f}  smaller ones"


def total(rows: Iterable[Saved], kind: str = COMPUTED) -> int:
    """Bytes of the tensors of a kind."""
    return sum(row.size for row in rows if row.kind == kind)


# Of nodes #


def _results(graph: fx.Graph) -> list:
    (output,) = (n for n in graph.nodes if n.op == "output")
    return list(output.args[0])


def _forward_results(captured: Captured) -> int:
    """How many of the forward's results its caller gets: those that are no input of the backward
    come first."""
    assert captured.forward is not None and captured.backward is not None, "no backward was cut"
    given = sum(n.op == "placeholder" for n in captured.backward.nodes)
    tangents = sum(
        n.op == "placeholder" and n.name.startswith("tangents") for n in captured.backward.nodes
    )
    return len(_results(captured.forward)) - (given - tangents)


def _bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return prod(map(int, value.shape)) * value.itemsize
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _empty(value: object) -> object:
    if not isinstance(value, Tensor):
        return None if value is None else int(value)  # a size
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _memory(node: fx.Node) -> fx.Node:
    """The node whose memory a view reads."""
    while get_default_op_list().is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _users(node: fx.Node) -> list[fx.Node]:
    """Users of a node and of its views."""
    found = []
    for user in node.users:
        found += _users(user) if get_default_op_list().is_view(user) else [user]
    return found


def _writer(node: fx.Node) -> str:
    """The operator that wrote a node, with the number of the result: "quantize[2]"."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return f"{_writer(node.args[0])}[{node.args[1]}]"
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.name if node.op == "placeholder" else str(node.target)
    return node.target.name().split("::")[1].split(".")[0]


def _source(node: fx.Node) -> str:
    """The module in which a node was traced, within the layer."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return ".".join(w for w in path.replace("L['self']", "").split(".") if w.isidentifier())


def _is_reduced(node: fx.Node) -> bool:
    """A statistic of an operand reads it: its magnitudes, which a compiler fuses."""
    return _writer(node) in ("abs", "amax")


def _fuses(node: fx.Node) -> bool:
    return get_default_op_list().is_fusible(node)


def _has_tokens(node: fx.Node, tokens: int) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and tokens in value.shape and value.numel() > tokens
