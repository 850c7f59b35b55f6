# SPDX-License-Identifier: Apache-2.0
"""`fq.hold` and `fq.freeze`: codes that outlive a forward only where a user asked for it, with the
same bits."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import pickle
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

import fsdp_quant as fq
from dist_tests import kinds
from dist_tests.laws import EVERYTHING, assert_same_bytes, kept_step, recorded_saves, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.counters import counters
from fsdp_quant.formats import ROWWISE
from fsdp_quant.gemm import StaleWeightError
from fsdp_quant.linear import fused
from fsdp_quant.models import reads
from fsdp_quant.models.steps import converted_modules
from fsdp_quant.tensor.model_weights import quantized_weights
from fsdp_quant.tensor.quantized_tensor import QuantizedTensor
from fsdp_quant.tensor.quantized_weight import QuantizedWeight
from fsdp_quant.tensor.torch_compat import local_of
from fsdp_quant.tensor.weight_shard import WeightShard
from fsdp_quant.training import hold

RECIPES = {
    "identity": recipes.identity(),
    "fp8_current": recipes.fp8_current(),
    "fp8_block": recipes.fp8_block(),
    "mxfp8": recipes.mxfp8(),
    "hybrid": recipes.hybrid("mxfp8", "nvfp4"),
    "nvfp4": recipes.nvfp4(),
}


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False))


def net(recipe: fq.Recipe) -> nn.Module:
    return fq.convert(plain_net(), recipe)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))


def accumulated(model: nn.Module) -> list[torch.Tensor]:
    fq.begin_step(0)
    outputs = []
    for micro in range(3):
        y = model(batch(micro))
        y.square().mean().backward()
        outputs.append(y.detach())
    return [*outputs, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", RECIPES)
def test_hold_quantizes_once_with_the_same_bits(name: str):
    """If false, accumulation inside fq.hold trains on other codes, or pays for each micro-batch."""
    model = net(RECIPES[name])
    want = [t.clone() for t in accumulated(model)]
    model.zero_grad()
    counters.reset()
    with fq.hold(model):
        got = accumulated(model)
    for a, b in zip(got, want):
        assert_same_bytes(a, b, f"{name}: held")
    assert all(count == 1 for count in counters.of("weight encode").values())
    model(batch(0))
    assert model[0]._weight_state.held is None


def test_micro_batches_in_flight_share_held_codes():
    """If false, a pipeline saves the codes of every weight once per micro-batch in flight."""
    layer, copies = fq.convert(nn.Sequential(nn.Linear(256, 512)), "mxfp8"), []
    x = values(8, 256, dtype=torch.float32).requires_grad_()
    for held in (contextlib.nullcontext(), fq.hold(layer)):
        with recorded_saves() as saved, held:
            outputs = [layer(x) for _ in range(4)]
        codes = [t for t in saved if t.numel() == 256 * 512 and t.dtype.itemsize == 1]
        copies.append(len({t.data_ptr() for t in codes}))
        del outputs
    assert copies == [4, 1]


def delayed_both_ways(role: fq.Role) -> fq.HybridQuantizer:
    sides = [
        fq.Quantizer(fq.format_of("fp8_tensor", element=e), scaling=fq.DelayedScaling(4))
        for e in ("e4m3", "e5m2")
    ]
    return fq.HybridQuantizer(*sides)


@pytest.mark.parametrize("sharded", [(), ("0", "2"), ("",)])
@pytest.mark.parametrize("is_part", [False, True])
def test_delayed_scales_of_weights_follow_training_alone(sharded: tuple[str, ...], is_part: bool):
    """If false, weights with delayed scales that generate first in a step, or are gathered before
    their step begins, are scaled by a step that never was.

    is_part:  of the model that was converted, which does not run itself, as a LightningModule does
              not.
    """

    def trained(sharded: tuple[str, ...], context, generates: bool) -> nn.Module:
        model = plain_net()
        whole = nn.ModuleDict({"part": model}) if is_part else model
        fq.convert(whole, fq.CustomRecipe(delayed_both_ways))
        for name in sharded:
            fully_shard(model.get_submodule(name))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            fq.begin_step(step)
            with context(model):
                if generates:
                    with torch.no_grad():
                        model.eval()(batch(9))
                for micro in range(2):
                    model.train()(batch(2 * step + micro)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    expected = dict(trained((), lambda model: contextlib.nullcontext(), False).named_parameters())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for context, generates in itertools.product(
            (fq.hold, lambda model: contextlib.nullcontext()), (True, False)
        ):
            for name, value in trained(sharded, context, generates).named_parameters():
                assert_same_bytes(value.full_tensor() if sharded else value, expected[name], name)
    finally:
        dist.destroy_process_group()


def test_hold_refuses_writes_and_misuse():
    """If false, a weight that an optimizer writes inside multiplies as it was, in silence."""
    model = net(RECIPES["fp8_current"])
    with fq.hold(model):
        model(batch(0))
        with torch.no_grad():
            model[0].weight.mul_(2)
        with pytest.raises(StaleWeightError, match="0.weight was written inside fq.hold"):
            model(batch(0))
        with pytest.raises(ValueError, match="held already"), fq.hold(model):
            pass
    model(batch(0))
    with pytest.raises(ValueError, match="no fq.Linear"), fq.hold(nn.Linear(4, 4)):
        pass


def test_a_hold_that_nobody_ends_is_named():
    """If false, a generator that is never closed leaves a model that cannot be held, and no word of
    who did."""
    model = net(RECIPES["mxfp8"])
    left = fq.hold(model)
    left.__enter__()
    with pytest.raises(ValueError, match=rf"0.weight is held already, .* {__file__}:"):
        fq.hold(model).__enter__()
    del left
    gc.collect()  # ends it
    with fq.hold(model):
        model(batch(0))


def test_hold_keeps_codes_of_parameters_alone():
    """If false, a call with other parameters multiplies codes of the model's own, or a layer that
    was put in place of one."""
    model, twin = net(RECIPES["mxfp8"]), net(RECIPES["mxfp8"])
    with torch.no_grad():
        other = {name: p * 2 for name, p in model.named_parameters()}
        twin.load_state_dict(other)
        with fq.hold(model):
            own = model(batch(0))
            copied = copy.deepcopy(model)
            copied.load_state_dict(other)
            for got in (torch.func.functional_call(model, other, batch(0)), copied(batch(0))):
                assert_same_bytes(got, twin(batch(0)), "other values")
            assert_same_bytes(model(batch(0)), own, "held")
            model[0] = twin[0]
            model[2] = twin[2]
            assert_same_bytes(model(batch(0)), twin(batch(0)), "other layers")


NAMED = [*recipes.names(), "fp8_row/fp8_block", "nvfp4/mxfp8"]


@contextlib.contextmanager
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["linear", "packed", "experts", "parameters"])
def test_a_recipe_that_changes_inside_hold_changes_the_codes(kind: str, sharded: bool):
    """If false, codes of one recipe are multiplied as those of another, in silence, after
    `fq.set_recipe` or a switch of a schedule."""

    def made(recipe: fq.Recipe | str) -> nn.Module:
        model = kinds.converted(kind, recipe)
        return fully_shard(model) if sharded else model

    chain = [[*NAMED, NAMED[0]]]
    with kept_step(), one_rank():
        fq.begin_step(0)
        want = {name: kinds.step(kinds.converted(kind, name)) for name in NAMED}
        for names in itertools.permutations(NAMED, 2) if EVERYTHING else chain:
            model = made(names[0])
            with fq.hold(model):
                for name in names:
                    fq.set_recipe(model, name)
                    for got in (kinds.step(model), kinds.step(model)):
                        for a, b in zip(got, want[name], strict=True):
                            assert_same_bytes(a, b, f"{names}: {name}")
        model = made("mxfp8")
        later = recipes.nvfp4()
        fq.set_recipe(model, recipes.schedule(recipes.mxfp8(), (1, None, later)))
        with fq.hold(model):
            kinds.step(model)
            fq.begin_step(1)
            got = kinds.step(model)
        for a, b in zip(got, kinds.step(kinds.converted(kind, later)), strict=True):
            assert_same_bytes(a, b, "a step later")


def reachable_tensors(root: object) -> list[torch.Tensor]:
    """Tensors that objects of our own reach, which classes and modules do not."""
    seen, found, todo = set(), [], [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or issubclass(type(one), (type, type(gc))):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.append(one)
        todo += gc.get_referents(one)
    return found


GRAPHED = {
    "frozen": {QuantizedTensor},
    "parameters": {QuantizedWeight},
    "gathered": {WeightShard, QuantizedTensor},
    "packed": {WeightShard, QuantizedTensor},
}


@pytest.mark.parametrize("form", GRAPHED)
def test_graphs_hold_no_codes(form: str):
    """If false, the codes of a dropped model stay alive as long as the process, in the guards of
    its graphs."""
    with one_rank():
        kind = {"frozen": "linear", "gathered": "linear"}.get(form, form)
        model = kinds.converted(kind, "mxfp8").bfloat16()
        if form == "frozen":
            fq.freeze(model.requires_grad_(False))
        elif form != "parameters":
            fully_shard(model)
        seen = [t.to_local() if isinstance(t, DTensor) else t for t in model.parameters()]
        hook = model.register_forward_pre_hook(lambda m, args: seen.extend(m.parameters()))
        x = kinds.batch().bfloat16().requires_grad_()
        model(x)
        weights = [t for t in seen if hasattr(t, "__tensor_flatten__")]
        assert {type(t) for t in weights} == GRAPHED[form]
        for weight in weights:
            _, metadata = weight.__tensor_flatten__()
            assert not reachable_tensors(metadata)
    if form not in ("frozen", "parameters"):
        return
    codes = [weakref.ref(m.weight.rowwise.data) for m in (model[0], model[2])]
    if form == "parameters":
        codes += [weakref.ref(m.weight.inner) for m in (model[0], model[2])]
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    seen.clear()
    del model, weights, weight, hook, metadata
    gc.collect()
    assert all(code() is None for code in codes), "dynamo was not reset"


@pytest.mark.parametrize("form", ["held", "experts", "autocast"])
def test_dropped_graphs_keep_no_codes(form: str):
    """If false, codes of fq.hold, of frozen experts or of an fp32 base under torch.autocast outlive
    the model that was compiled, or the graph multiplies other codes than eager mode."""
    model = kinds.converted("packed" if form == "experts" else "linear", "mxfp8")
    model.requires_grad_(False)
    context, x = contextlib.nullcontext(), kinds.batch().requires_grad_()
    if form != "held":
        fq.freeze(model)
    if form == "autocast":
        context = torch.autocast("cpu", torch.bfloat16)
    run = torch.compile(model, backend="aot_eager")
    with context, fq.hold(run) if form == "held" else contextlib.nullcontext():
        got, want = run(x), model(x)
        assert_same_bytes(got, want, form)
        assert got.dtype is (torch.bfloat16 if form == "autocast" else torch.float32)
        gradients = [torch.autograd.grad(y.float().sum(), x)[0] for y in (got, want)]
        assert_same_bytes(*gradients, f"{form}: gradient")
        weights = [w.parameter for w in quantized_weights(model)]
        if form == "held":
            weights = [layer.runtime.graphs.codes for layer in converted_modules(model).values()]
        storages = [t for w in weights for t in w._memory()]
        codes = [StorageWeakRef(t.untyped_storage()) for t in storages]
        assert codes and not any(code.expired() for code in codes)
        del weights, storages, got, want
    del run, model
    gc.collect()
    assert all(code.expired() for code in codes), "dynamo was not reset"


@pytest.mark.parametrize(
    "kind, name, most",
    [
        *itertools.product(("linear", "experts", "packed", "Conv1D"), ("mxfp8",), (1.04,)),
        ("linear", "fp8_current", 1.01),
        ("experts", "nvfp4", 0.57),
        ("compiled", "mxfp8", 1.04),
    ],
)
def test_backwards_that_decode_weights_keep_their_codes(kind: str, name: str, most: float):
    """If false, backward_override="dequantized" keeps a decoded copy of each weight from its
    forward to its backward."""
    recipe = recipes.by_name(name, backward_override="dequantized")
    model = kinds.converted("linear" if kind == "compiled" else kind, recipe)
    model = model.bfloat16().requires_grad_(False)  # so that no input is kept
    run = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
    with recorded_saves() as saved:
        y = run(kinds.batch().bfloat16().requires_grad_())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {t.untyped_storage().data_ptr(): t.nbytes for t in saved if t.dtype is not torch.bool}
    size = sum(nbytes for place, nbytes in kept.items() if place not in own)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    activations = 2 * 16 * 96 if kind in ("linear", "Conv1D", "compiled") else 0  # of the ReLU
    assert size - activations <= most * matrices, f"{(size - activations) / matrices:.3f}"
    y.sum().backward()


FIXED = "is frozen, and keeps no values beside its codes, which are mxfp8"


def test_recipes_that_change_frozen_weights_are_refused():
    """If false, the forward of a later step fails, or multiplies codes of other formats."""
    mx, other = recipes.mxfp8(), recipes.nvfp4()
    kept = recipes.per_layer(other, {"0": mx})
    model = net(mx)
    model[0].weight.requires_grad_(False)
    fq.freeze(model)
    for refused in (other, recipes.schedule(mx, (3, None, other)), "mxfp4"):
        with pytest.raises(ValueError, match=rf"fq.set_recipe: 0.weight {FIXED}.*fq.unfreeze"):
            fq.set_recipe(model, refused)
        assert [layer.recipe for layer in (model[0], model[2])] == [mx, mx]
    with kept_step():
        fq.set_recipe(model, recipes.schedule(mx, (1, None, kept)))
        for step in range(2):
            fq.begin_step(step)
            model(batch(step)).sum().backward()
        assert (model[0].recipe, model[2].recipe) == (mx, other)
        model = net(recipes.schedule(mx, (3, None, other)))
        model[0].weight.requires_grad_(False)
        with pytest.raises(ValueError, match=rf"fq.freeze: 0.weight {FIXED}"):
            fq.freeze(model[0])
        assert type(model[0].weight) is nn.Parameter
        model = net(recipes.schedule(mx, (3, None, kept)))
        model[0].weight.requires_grad_(False)
        assert fq.freeze(model) == 1
    for context, run in ((other, model[0]), (other, torch.compile(model[0]))):
        with pytest.raises(Exception, match="0.weight holds codes of mxfp8.*use fq.set_recipe"):
            with torch.no_grad(), fq.autocast(context):
                run(batch(0))
    x = batch(0).requires_grad_()
    with fq.autocast(recipes.hybrid("mxfp8", "nvfp4")):  # the codes serve any backward
        model[0](x).sum().backward()
    assert x.grad is not None
    with fq.quantized_model_init("fp8_current"):
        layer = fq.Linear(64, 32)
    with pytest.raises(ValueError, match="linear.weight holds codes of fp8_tensor.*delayed"):
        with torch.no_grad(), fq.autocast("fp8_delayed"):  # the same formats, and other scales
            layer(torch.ones(8, 64))


@pytest.mark.parametrize("name", RECIPES)
def test_frozen_weights_are_codes_with_the_same_bits(name: str):
    """If false, a frozen base gives other outputs or gradients than before, or keeps its
    high-precision weight."""
    model = net(RECIPES[name])
    model[0].weight.requires_grad_(False)
    x = batch(0).requires_grad_()
    fq.begin_step(0)
    want = model(x)
    gradients = torch.autograd.grad(want.square().mean(), [x, model[2].weight])
    assert fq.freeze(model, keep="operands") == 1
    assert isinstance(model[0].weight, QuantizedTensor) and not isinstance(
        model[2].weight, QuantizedTensor
    )
    got = model(x)
    assert_same_bytes(got, want, f"{name}: output")
    for a, b in zip(torch.autograd.grad(got.square().mean(), [x, model[2].weight]), gradients):
        assert_same_bytes(a, b, f"{name}: gradient")
    assert [n for n, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight"]


@pytest.mark.parametrize("fmt", ["fp8_row", "fp8_1x128"])
def test_codes_that_no_gemm_reads_turned_are_kept_by_direction(fmt: str):
    """If false, dgrad of a frozen base decodes its weight to fp32."""
    quantizer = fq.HybridQuantizer(fmt, fmt)
    assert quantizer.over_rowwise == quantizer
    layer = fq.convert(nn.Sequential(nn.Linear(64, 96)), recipes.fp8_row()).requires_grad_(False)
    fq.freeze(layer)
    assert layer[0].weight.columnwise is not None


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_frozen_weight_keeps_its_codes_once(name: str, compiles: bool):
    """If false, a base takes the memory of the operands of both directions, or its backward
    multiplies other values than its forward."""
    model = net(RECIPES[name])
    layer = model[0]
    quantizer = layer.plan.weight
    model.requires_grad_(False)
    fq.begin_step(0)
    x = batch(0).requires_grad_()
    want = layer(x)
    dtype = layer.plan.compute_dtype if name != "identity" else torch.float32
    forward = quantizer.storages(layer.weight.detach().to(dtype))[0][ROWWISE]
    assert fq.freeze(model) == 2
    run = torch.compile(layer, backend="aot_eager") if compiles else layer
    got = run(x)
    assert_same_bytes(got, want, "output")
    frozen = layer.weight
    for buffer, of in zip(frozen.rowwise.buffers().values(), forward.buffers().values()):
        assert_same_bytes(buffer, of, "codes")
    kept = layer.plan.weight
    assert kept.shares_storage or kept.is_derived, "rows of these recipes are not rotated"
    assert frozen.columnwise is None and held_bytes(frozen) == forward.nbytes
    dy = torch.randn(got.shape, generator=torch.Generator().manual_seed(5), dtype=got.dtype)
    (dx,) = torch.autograd.grad(got, x, dy)
    if kept.turns and not layer.plan.grad_output.is_stochastic:
        codes = layer.plan.grad_output.side(ROWWISE).storage(dy, ROWWISE)
        decoded = codes.dequantize(torch.float64) @ frozen.dequantize(torch.float64)
        torch.testing.assert_close(dx.double(), decoded, rtol=1e-5, atol=1e-6)
    assert fq.unfreeze(model) == 2
    assert layer.plan.weight == quantizer == layer.runtime.weight_state.quantizer


def frozen_step(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    fq.begin_step(0)
    x = kinds.batch().to(dtype).requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("keep", ["codes", "operands"])
@pytest.mark.parametrize("kind", ["packed", "mixtral", "gpt_oss", "Conv1D"])
def test_experts_and_transposed_weights_are_frozen(kind: str, keep: str, monkeypatch):
    """If false, a frozen base has values of its experts, or multiplies other codes than without
    fq.freeze, eager, copied, pickled, compiled or loaded."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(reads, "_PROVEN", {})
    for name in ("mxfp8", "nvfp4", "mxfp4") if EVERYTHING or keep == "codes" else ("mxfp8",):
        recipe = recipes.by_name(name)
        model = kinds.converted(kind, recipe).bfloat16().requires_grad_(False)
        weights = [w for w in quantized_weights(model) if w.attribute == "weight"]
        shapes, y = [p.shape for p in model.parameters()], frozen_step(model)[0]
        if keep == "codes":  # the backward of the rowwise values, which unfrozen weights have too
            hold.read_rowwise(model, [layer for w in weights for layer in w.layers])
        want = frozen_step(model)
        assert_same_bytes(want[0], y, "codes of the forward are the same")
        assert fq.freeze(model, keep=keep) == len(weights)
        torch._dynamo.reset()
        runs = [model, copy.deepcopy(model)]
        reads._PROVEN.clear()  # a pickle of another process proves its experts again
        runs.append(pickle.loads(pickle.dumps(model)))
        runs += [torch.compile(model, backend="aot_eager")] * (name == "nvfp4" or EVERYTHING)
        for run in runs:
            for a, b in zip(frozen_step(run), want, strict=True):
                assert_same_bytes(a, b, f"{kind} {name}")
        if keep == "codes":
            size = sum(held_bytes(w.parameter) for w in weights)
            most = {"mxfp8": 1.04, "nvfp4": 0.57, "mxfp4": 0.54}[name]
            assert size <= most * sum(w.parameter.numel() for w in weights)
        with pytest.raises(ValueError, match=r"is frozen, and keeps no values.*fq.unfreeze"):
            fq.set_recipe(model, "fp8_current")
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        model.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        assert_same_bytes(frozen_step(model)[0], want[0], "loaded")
        assert fq.unfreeze(model) == len(weights)
        assert [p.shape for p in model.parameters()] == shapes
        fq.set_recipe(model, "fp8_current")
        frozen_step(model)


def test_freeze_refuses_what_it_cannot_hold():
    """If false, a weight that trains loses its values."""
    model = net(RECIPES["mxfp8"])
    with pytest.raises(ValueError, match="of 2 converted weights 2 train"):
        fq.freeze(model)
    delayed = net(recipes.fp8_delayed()).requires_grad_(False)
    with pytest.raises(ValueError, match="0.weight is scaled by a history"):
        fq.freeze(delayed)


def held_bytes(*tensors: QuantizedTensor) -> int:
    """Of all memory behind weights, each storage once."""
    held: list[Tensor] = []
    for tensor in tensors:
        content, slots = getattr(tensor, "_content", None), tensor._pair
        sides = [s for pair in (slots, *slots.groups) for s in (pair.rowwise, pair.columnwise)]
        held += [b for side in sides if side is not None for b in side.buffers().values()]
        held += [b for s in slots.operands.values() for b in s.buffers().values()]
        held += [content.values] if content is not None and content.values is not None else []
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values()
    )


@pytest.mark.parametrize("override", [None, "dequantized"])
@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "hybrid"])
def test_frozen_quantized_parameters_hold_the_codes_that_are_read(name: str, override: str | None):
    """If false, a base of codes holds high-precision values, or codes of a backward that nobody
    runs."""
    families = {
        "mxfp8": ("mxfp8",) * 2,
        "fp8_block": ("fp8_block",) * 2,
        "hybrid": ("mxfp8", "nvfp4"),
    }[name]
    recipe = recipes.hybrid(*families, backward_override=override)
    torch.manual_seed(0)
    with fq.quantized_model_init(recipe):
        model = fq.convert(
            nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False)).bfloat16(),
            recipe,
        )
    model.requires_grad_(False)
    x = batch(0).bfloat16().requires_grad_()
    fq.begin_step(0)
    want = model(x)
    (gradient,) = torch.autograd.grad(want.float().square().mean(), [x])
    forward = model[0].weight.rowwise.nbytes
    inference = copy.deepcopy(model)
    once = copy.deepcopy(model)
    assert fq.freeze(model, keep="operands") == 2
    assert fq.freeze(inference, backward=False, keep="operands") == fq.freeze(once) == 2
    got = model(x)
    assert_same_bytes(got, want, "output")
    assert_same_bytes(
        torch.autograd.grad(got.float().square().mean(), [x])[0], gradient, "gradient"
    )
    assert_same_bytes(inference(x), want, "output of inference")
    assert held_bytes(inference[0].weight) == held_bytes(once[0].weight) == forward
    both = {
        "mxfp8": 2 * forward,
        "fp8_block": forward,
        "hybrid": forward + 96 * 64 // 2 + 64 * 6 + 4,
    }[name]
    assert held_bytes(model[0].weight) == (forward if override else both)
    fq.state_dict(model), fq.state_dict(inference)
    if override is None and name != "fp8_block":
        with pytest.raises(ValueError, match="no columnwise storage"):
            inference(x).sum().backward()


def test_a_load_into_frozen_codes_is_refused():
    """If false, a frozen layer is wrapped anew around codes, or silently keeps the old ones, or an
    error of a load or a cast does not say how values come back."""
    with fq.quantized_model_init(recipes.mxfp8()):
        model = fq.convert(nn.Sequential(nn.Linear(64, 64)), recipes.mxfp8()).requires_grad_(False)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    fq.freeze(model)
    before = model[0].weight.dequantize()
    with pytest.raises(RuntimeError, match=r"holds codes and no quantizer.*fq.unfreeze\(model\)"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"without decoding it.*fq.unfreeze\(model\)"):
        nn.Sequential(nn.Linear(64, 64)).load_state_dict(model.state_dict())
    with pytest.raises(NotImplementedError, match=r"0.weight, a.* cast .*fq.unfreeze\(model\)"):
        model.half()
    assert type(model[0].weight) is QuantizedTensor
    assert_same_bytes(model[0].weight.dequantize(), before, "codes")


STATES = {
    "mxfp8": recipes.mxfp8(),
    "qat(nvfp4)": recipes.qat("nvfp4"),
    "fp8_row": recipes.fp8_row(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STATES)
def test_states_of_frozen_weights_load(name: str, dtype: torch.dtype):
    """If false, a model whose weights are assigned from a state of codes fails in its backward, or
    multiplies others than the model that was saved; or a load of values keeps their plan."""
    saved, plain = (net(STATES[name]).to(dtype).requires_grad_(False) for _ in range(2))
    values = {key: t.clone() for key, t in saved.state_dict().items()}
    fq.freeze(saved)
    state, want = dict(saved.state_dict()), frozen_step(saved, dtype)
    decoded = {k: getattr(t, "_decoded", t.to)(dtype) for k, t in state.items()}
    for loaded, given, assign in (
        (net(STATES[name]), state, True),
        (copy.deepcopy(saved), state, False),
        (copy.deepcopy(saved), decoded, False),
    ):
        loaded.to(dtype).requires_grad_(False).load_state_dict(given, assign=assign)
        assert str(fq.plan(loaded)) == str(fq.plan(saved))
        for a, b in zip(frozen_step(loaded, dtype), want, strict=True):
            assert_same_bytes(a, b, f"{name}, {dtype}, assign={assign}")
        assert saved[0].weight._pair.owner is saved[0]._weight_state
    fq.load_state_dict(loaded, fq.state_dict(saved))
    loaded.load_state_dict(values, assign=True)
    for a, b in zip(frozen_step(loaded, dtype), frozen_step(plain, dtype), strict=True):
        assert_same_bytes(a, b, "values again")
    if name == "mxfp8":
        with pytest.raises(ValueError, match="in their dtype, frozen only if they were"):
            fq.load_state_dict(loaded, fq.state_dict(saved))
        other = net(STATES[name]).half().requires_grad_(False)
        fq.freeze(other)
        with pytest.raises(RuntimeError, match=r"saved in another dtype with .*assign=True"):
            other.load_state_dict(state)


@pytest.mark.parametrize("kind", ["linear", "mixtral"])
def test_codes_of_a_state_are_multiplied_as_they_were_saved(kind: str):
    """If false, experts whose codes were assigned fail in their backward, eager or compiled."""
    pytest.importorskip("transformers")
    saved, loaded = (kinds.converted(kind, "mxfp8").requires_grad_(False) for _ in range(2))
    fq.freeze(saved.bfloat16())
    loaded.load_state_dict(saved.state_dict(), assign=True)
    for run in (loaded, torch.compile(loaded, backend="aot_eager")):
        for a, b in zip(frozen_step(run), frozen_step(saved), strict=True):
            assert_same_bytes(a, b, kind)


@pytest.mark.parametrize("kind", ["linear", "mixtral"])
def test_a_saver_of_values_is_told_what_to_call(kind: str, tmp_path):
    """If false, safetensors, save_pretrained, a Trainer or accelerate end in torch's "invalid
    python storage" over a frozen base, and its user has lost the steps before."""
    safetensors = pytest.importorskip("safetensors.torch")
    pytest.importorskip("transformers")
    model = kinds.converted(kind, "mxfp8").requires_grad_(False)
    fq.freeze(model)
    says = r"weight, a Quant.* has no storage .*call fq.unfreeze\(model\).* or fq.export"
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=says):
        safetensors.save_model(model, file)
    with pytest.raises(ValueError, match=says):
        safetensors.save_file(model.state_dict(), file)
    fq.unfreeze(model)
    safetensors.save_model(model, file)


def test_frozen_weights_are_sharded_or_left_out_of_fully_shard():
    """If false, a copy of a frozen model shares codes or a state with it, or FSDP2 breaks a model
    that leaves them out."""
    model = net(RECIPES["mxfp8"]).requires_grad_(False)
    fq.freeze(model)
    model[0].bias.requires_grad_()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        want, copied = model(batch(0)), copy.deepcopy(model)
        assert copied[0].weight._pair.owner is copied[0]._weight_state
        assert type(local_of(fully_shard(copied)[0].weight)) is QuantizedWeight
        assert_same_bytes(copied(batch(0)), want, "output of shards")
        fully_shard(model, ignored_params={m.weight for m in model if isinstance(m, fq.Linear)})
        assert_same_bytes(model(batch(0)), want, "output")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["linear", "mixtral", "gpt_oss", "Conv1D", "attention"])
def test_state_dicts_of_sharded_codes_are_stored_as_the_model_stores_values(kind: str):
    """If false, a checkpoint holds weights [K, N] turned, which a square weight does not show, or
    does not load where it was saved."""
    pytest.importorskip("transformers")
    model = kinds.converted(kind, "mxfp8").requires_grad_(False)
    fq.freeze(model)
    values = copy.deepcopy(model)
    fq.unfreeze(values)
    want, y = values.state_dict(), model(kinds.batch())
    with one_rank():
        fully_shard(model)
        saved = model.state_dict()
        for name, value in want.items():
            assert_same_bytes(saved[name].full_tensor(), value, name)
        model.load_state_dict(saved)
        assert_same_bytes(model(kinds.batch()), y, "output")
        others = {name: 2 * value for name, value in saved.items()}
        with pytest.raises(RuntimeError, match=r"without values: it is frozen"):
            model.load_state_dict(others)


def test_parallel_styles_cut_no_frozen_codes():
    """If false, a process dies where torch scatters the memory that codes do not have."""
    experts = fq.GroupedMLP(2, 64, 32, recipe="mxfp8").requires_grad_(False)
    model = net(RECIPES["mxfp8"]).requires_grad_(False)
    for frozen in (experts, model):
        fq.freeze(frozen)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        for module, style in (
            (experts, fq.parallel.ExpertParallel()),
            (model, {"0": fq.parallel.ColwiseParallel()}),
            (model, {"0": fq.parallel.RowwiseParallel()}),
        ):
            with pytest.raises(ValueError, match="weight is codes of fq.freeze, .*fq.unfreeze"):
                parallelize_module(module, mesh, style)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_frozen_weight_follows_gemms_that_the_guard_moves(compiles: bool):
    """If false, LoRA over a frozen model ends where the guard moves a GEMM: its anchored codes have
    no other layout."""
    for product, rung in (("fprop", "anchored"), ("dgrad", "exact")):
        seen = []
        for frozen in (False, True):
            with hopper.emulated():
                torch.manual_seed(0)
                torch._dynamo.reset()
                net = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 64, bias=False))
                fq.convert(net.bfloat16().requires_grad_(False), fq.recipes.mxfp8())
                if frozen:
                    fq.freeze(net)
                run = torch.compile(net, backend="aot_eager") if compiles and frozen else net
                for step in range(2):
                    x = values(32, 64, seed=step).bfloat16().requires_grad_()
                    y = run(x)
                    y.float().square().mean().backward()
                    seen.append((y.detach().float(), x.grad.float()))
                    for layer in converted_modules(net).values():
                        layer.runtime.move_to({product: rung})
        for step, (want, got) in enumerate(zip(seen[:2], seen[2:])):
            for a, b in zip(want, got):
                off = float((a - b).norm() / a.norm())
                assert off <= (0 if step == 0 else 1e-3), f"{product} {rung} {step}: {off:.1e}"


LATE = {
    **{name: RECIPES[name] for name in ("fp8_current", "fp8_block", "mxfp8", "nvfp4")},
    "fp8_row": recipes.fp8_row(),
    "qat": recipes.qat("nvfp4"),
}


@pytest.mark.parametrize("name", LATE)
def test_a_frozen_layer_is_one_call_and_holds_no_operand_between_passes(name: str, monkeypatch):
    """If false, LoRA in eager mode pays for each operator of a layer, or a step holds the operands
    of the backward of all layers."""

    def run(one_call: bool) -> list[Tensor]:
        if not one_call:
            monkeypatch.setattr(fused, "_is_one_call", lambda *args: False)
        layer = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
        layer.weight.data.copy_(values(96, 64, seed=1))
        layer = fq.convert(nn.Sequential(layer).requires_grad_(False), LATE[name])
        fq.freeze(layer)
        x, results = values(32, 64).bfloat16().requires_grad_(), []
        for _ in range(2):
            y = layer(x)
            late = [
                each.operand.data for each in fused._LATE.get(layer[0].weight._pair, {}).values()
            ]
            for retain in (True, False):
                assert all(t.untyped_storage().nbytes() == 0 for t in late)
                results += torch.autograd.grad(y, x, y.detach(), retain_graph=retain)
            assert len(late) == (one_call and name != "nvfp4")  # which is decoded
            results.append(y.detach())
        return results

    with hopper.emulated() as operators:
        whole = run(True)
        assert operators.count("linear_step_backward") == 4
        for a, b in zip(whole, run(False), strict=True):
            assert_same_bytes(a, b, name)


@pytest.mark.parametrize("override", [None, "dequantized"])
@pytest.mark.parametrize("name", ["mxfp8", "fp8_current", "nvfp4"])
def test_graphs_multiply_held_codes(name: str, override: str | None):
    """If false, a compiled layer quantizes its weight in every forward inside fq.hold, or
    multiplies other codes than eager mode."""
    recipe = recipes.by_name(name, backward_override=override)
    results, quantized = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = fq.convert(nn.Sequential(nn.Linear(64, 32)), recipe)
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager") if compiled else model
        for context in (contextlib.nullcontext(), fq.hold(run)):
            model.zero_grad()
            fq.begin_step(0, model=model)
            x = torch.linspace(-1, 1, 64 * 64, dtype=torch.float32, device="cpu").view(64, 64)
            x.requires_grad_()
            counters.reset()
            with context:
                outputs = [run(x * scale) for scale in (1.0, 0.5, 3.0, 7.0)]
                sum(y.square().sum() for y in outputs).backward()
            quantized.append(sum(counters.of("quantize").values()))
            results.append([*map(Tensor.detach, outputs), x.grad, model[0].weight.grad])
    for got in results[1:]:
        for tensor, want in zip(got, results[0]):
            assert_same_bytes(tensor, want, "held")
    eager, eager_held, graph, graph_held = quantized
    assert graph_held == eager_held < graph, quantized
    assert eager_held < eager or override is not None, quantized
    if (name, override) == ("mxfp8", None):
        assert quantized == [24, 18, 24, 18]


def test_a_write_inside_a_hold_of_graphs_is_named():
    """If false, a compiled model multiplies codes of a weight that was written since, silently."""
    model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    run = torch.compile(model, backend="aot_eager")
    x = torch.ones(2, 64, dtype=torch.float32, device="cpu")
    with pytest.warns(UserWarning, match=r"0.weight \(of 1\) was written inside fq.hold"):
        with torch.no_grad(), fq.hold(run):
            run(x)
            model[0].weight.add_(1.0)
    with torch.no_grad(), fq.hold(run):
        assert_same_bytes(run(x), model(x), "the next hold")


def test_a_hold_that_cannot_begin_holds_nothing(monkeypatch):
    """If false, a model whose codes did not fit into memory stays held, and can never be held
    again."""

    def fail(*args):
        raise MemoryError("no room for codes")

    model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    model.compile(backend="aot_eager")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[fq.freeze.__module__], "_encode_weight", fail)
        with pytest.raises(MemoryError), fq.hold(model):
            pass
    with torch.no_grad(), fq.hold(model):
        model(torch.ones(2, 64, dtype=torch.float32, device="cpu"))
