# SPDX-License-Identifier: Apache-2.0
"""`WeightShard`: a sharded weight is a tensor over its own memory; the weight of `fq.Linear` is
nn.Linear's Parameter."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values
from fsdp_quant import recipes
from fsdp_quant.counters import counters
from fsdp_quant.gemm import StaleWeightError
from fsdp_quant.tensor import fsdp_hooks, torch_compat
from fsdp_quant.tensor.gather_group import GatherGroup
from fsdp_quant.tensor.weight_shard import WeightShard

RECIPE = recipes.hybrid("mxfp8", "nvfp4")


def linear(recipe: fq.Recipe = RECIPE, **options) -> fq.Linear:
    torch.manual_seed(0)
    return fq.Linear(48, 32, recipe=recipe, **options)


def shard_of(plain: Tensor) -> WeightShard:
    """Over the memory of `plain` [N, K]."""
    return WeightShard(plain, linear()._weight_state)


@pytest.fixture
def plain() -> Tensor:
    return values(32, 48, dtype=torch.float32)


@pytest.fixture
def mesh():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# A shard is its memory #


def test_a_shard_lies_where_its_values_lie(plain: Tensor):
    """If false, an optimizer that matches parameters by address, or a kernel that takes one, misses
    the weight."""
    shard = shard_of(plain)
    assert shard.data_ptr() == plain.data_ptr() != 0
    assert shard.untyped_storage().data_ptr() == plain.untyped_storage().data_ptr()
    assert shard.untyped_storage().nbytes() == plain.nbytes
    assert (shard.stride(), shard.storage_offset(), shard.dtype) == (
        plain.stride(),
        plain.storage_offset(),
        plain.dtype,
    )
    part = plain[8:24]
    assert (
        shard_of(part).data_ptr() == part.data_ptr() and shard_of(part).storage_offset() == 8 * 48
    )


def test_numpy_of_a_shard_shares_its_memory(plain: Tensor):
    """If false, numpy and libraries over it write a copy."""
    shard = shard_of(plain)
    shard.detach().numpy()[3] = 7
    assert_same_bytes(plain[3], torch.full((48,), 7.0), "written through numpy")
    assert_same_bytes(torch.from_dlpack(shard.detach().inner), plain, "dlpack")


def test_data_of_a_shard_takes_another_dtype(plain: Tensor):
    """If false, mixed_precision="bf16" of accelerate and PEFT's k-bit preparation are refused."""
    shard = nn.Parameter(shard_of(plain.clone()))
    shard.data = plain.bfloat16()
    assert shard.dtype is torch.bfloat16 and isinstance(shard, WeightShard)
    assert_same_bytes(shard.inner, plain.bfloat16(), "inner")
    shard.data = torch.zeros(3, 5)
    assert shard.shape == (3, 5) and shard.inner.count_nonzero() == 0
    shard.data = torch.empty(0)
    assert shard.numel() == 0


def test_a_shard_follows_the_memory_that_data_gives_it(plain: Tensor):
    """If false, a gather after `p.data = other` of the same shape sends the values before."""
    shard = nn.Parameter(shard_of(plain.clone()))
    for other in (plain + 1, (plain + 2).view(48, 32), (plain + 3).view(48, 32)):
        assert shard.inner.data_ptr() == shard.data_ptr()  # an alias that is kept
        shard.data = other
        assert_same_bytes(shard.inner, other, "inner")
        assert shard.inner.data_ptr() == other.data_ptr()


def test_the_alias_of_a_shard_is_kept_while_its_memory_stays():
    """If false, dynamo compiles a graph per forward, or a gather sends rows of the address, shape,
    dtype or order before."""
    memory = torch.arange(96 * 48, dtype=torch.float32).view(96, 48)
    square = memory.view(torch.bfloat16).flatten()[: 48 * 48].view(48, 48)
    shard = nn.Parameter(shard_of(memory[32:64]))
    # each differs from the one before in one of these only, both ways
    for other in (memory[64:], memory[:32], memory[:16], memory[:48], square, square.t()):
        kept = shard.inner
        assert shard.inner is kept and shard._flat_inner is shard._flat_inner
        shard.data = other
        for alias in (shard.inner, shard._flat_inner):
            assert alias.stride() == other.stride()
            assert_same_bytes(alias, other, f"{list(other.shape)} {other.dtype}")


def test_a_shard_is_shared_between_processes(plain: Tensor):
    """If false, Hogwild and data loaders that share a model end in an error."""
    shard = shard_of(plain)
    shard.share_memory_()
    assert shard.is_shared() and shard.inner.is_shared()
    assert_same_bytes(shard.inner, plain, "values")


# What keeps the class #

KEEPS = {
    "detach": lambda t: t.detach(),
    "view": lambda t: t.view(-1, 16),
    "split": lambda t: t.split(8)[1],
    "chunk": lambda t: t.chunk(3)[2],
    "narrow": lambda t: t.narrow(0, 2, 5),
    "slice": lambda t: t[4:9],
    "as_strided": lambda t: t.as_strided((4, 48), (48, 1), 48),
}
COPIES = {
    "clone": lambda t: t.clone(),
    "to a dtype": lambda t: t.to(torch.bfloat16),
    "to a device": lambda t: t.to("cpu", copy=True),
    "double": lambda t: t.double(),
    "new_zeros": lambda t: t.new_zeros(t.shape),
    "new_zeros of another shape": lambda t: t.new_zeros(4, 48),
    "zeros_like": lambda t: torch.zeros_like(t),
    "empty_like": lambda t: torch.empty_like(t).zero_(),
    "new_empty": lambda t: t.new_empty(t.shape).zero_(),
}
PLAIN = COPIES | {
    "add": lambda t: t + 1,
    "mul": lambda t: 2 * t,
    "t": lambda t: t.t(),
    "matmul": lambda t: t @ t.t(),
    "sum": lambda t: t.sum(0),
    "cat": lambda t: torch.cat([t, t]),
    "lerp": lambda t: t.lerp(t, 0.5),
    "foreach": lambda t: torch._foreach_mul([t], 2.0)[0],
    "norm": lambda t: torch.nn.utils.get_total_norm([t]),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", KEEPS)
def test_views_of_a_shard_are_shards(name: str, mode: type, plain: Tensor):
    """If false, FSDP2 splits or registers a weight and gathers it in high precision from then
    on."""
    shard, want = shard_of(plain), KEEPS[name](plain)
    with mode():
        got = KEEPS[name](shard)
    assert type(got) is WeightShard and got.state is shard.state
    assert_same_bytes(got.inner, want, name)
    shares = want.untyped_storage().data_ptr() == plain.untyped_storage().data_ptr()
    assert (got.data_ptr() == want.data_ptr()) is shares


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PLAIN)
def test_results_of_a_shard_are_plain(name: str, mode: type, plain: Tensor):
    """If false, gradients and optimizer states are of a weight's class, and something quantizes
    them."""
    with mode():
        got = PLAIN[name](shard_of(plain))
    assert type(got) is Tensor
    assert_same_bytes(got, PLAIN[name](plain), name)


def test_inference_mode_is_left_for_shards_alone(plain: Tensor):
    """If false, FSDP2 keeps inference tensors of a first forward that evaluates, and no step may
    write them; or results of an evaluation are tracked as those of training."""
    shard = shard_of(plain)
    with torch.inference_mode():
        part, doubled = shard.narrow(0, 0, 4), shard * 2
    assert not part.is_inference() and not part.inner.is_inference()
    assert doubled.is_inference()


def test_a_gradient_of_a_shard_is_plain(plain: Tensor):
    """If false, optimizers meet two classes in one list."""
    shard = nn.Parameter(shard_of(plain))
    (shard * 3).sum().backward()
    assert type(shard.grad) is Tensor
    assert_same_bytes(shard.grad, torch.full_like(plain, 3.0), "gradient")


# Copies #


def test_a_deepcopied_shard_has_memory_and_state_of_its_own(plain: Tensor):
    """If false, a copied model trains the original, or shares its histories."""
    shard = nn.Parameter(shard_of(plain))
    copied = copy.deepcopy(shard)
    assert (
        type(copied) is type(shard)
        and copied.requires_grad
        and copied.data_ptr() != shard.data_ptr()
    )
    assert copied.state is not shard.state and copied.state.name == shard.state.name
    assert_same_bytes(copied.detach().inner, plain, "values")
    with torch.no_grad():
        copied.zero_()
    assert plain.count_nonzero() > 0


def test_a_pickled_shard_is_its_values(plain: Tensor):
    """If false, a file with a view of a weight needs this library, or no loader accepts it."""
    shard, file = shard_of(plain).requires_grad_(), io.BytesIO()
    torch.save(shard, file)
    file.seek(0)
    assert b"fsdp_quant" not in file.getvalue()
    for loaded in (pickle.loads(pickle.dumps(shard)), torch.load(file, weights_only=True)):
        assert type(loaded) is Tensor and loaded.requires_grad
        assert_same_bytes(loaded.detach(), plain, "values")


@pytest.mark.parametrize("is_codes", [False, True], ids=["shard", "codes"])
def test_states_of_copies_are_those_of_plain_parameters(is_codes: bool, mesh, tmp_path):
    """If false, an average of the weights or an optimizer's state is saved, and no load accepts it;
    or an average of codes follows the weights."""
    with fq.quantized_model_init(RECIPE) if is_codes else contextlib.nullcontext():
        model = fq.convert(nn.Sequential(nn.Linear(48, 32)), RECIPE)
    fully_shard(model, mesh=mesh)
    weight = model[0].weight
    want = weight.detach().full_tensor().clone()
    for name, make in COPIES.items():
        copied = make(weight.detach())
        assert type(copied) is DTensor and type(copied.to_local()) is Tensor, name
        expected = COPIES[name](want)
        assert copied.dtype is expected.dtype, name
        assert_same_bytes(copied.to_local(), expected, name)
    for name, state in {"copy": weight.detach().clone(), "view": weight.detach()}.items():
        torch.save({"average": state}, tmp_path / name)
        loaded = torch.load(tmp_path / name, weights_only=True)["average"]
        assert type(loaded.to_local()) is Tensor, name
        assert_same_bytes(loaded.to_local(), want, name)
        dcp.save({"average": state}, checkpoint_id=tmp_path / f"{name} dcp")
        target = {"average": torch.zeros_like(weight)}
        dcp.load(target, checkpoint_id=tmp_path / f"{name} dcp")
        assert_same_bytes(target["average"].to_local(), want, f"{name}, dcp")
    average = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(2)
        average.lerp_(weight.detach().clone(), 0.5)
    assert_same_bytes(average.to_local(), want * 1.5, "average")


def test_a_shard_that_is_moved_stays_one(mesh):
    """If false, model.to(), .double() or to_empty() of a sharded model leaves a weight that is
    gathered in high precision."""
    model = nn.Sequential(linear())
    fully_shard(model, mesh=mesh)
    for move in (
        lambda: model.double(),
        lambda: model.to(torch.bfloat16),
        lambda: model.to_empty(device="cpu"),
        lambda: model.float(),
    ):
        move()
        local = model[0].weight.to_local()
        assert isinstance(local, WeightShard) and local.state is model[0]._weight_state
        assert local.dtype is model[0].weight.dtype is model[0].bias.dtype


# Writes #


@pytest.mark.parametrize("kind", ["for", "foreach", "fused"])
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda o: o.__name__
)
def test_optimizers_write_into_the_memory_of_a_shard(optimizer: type, kind: str, plain: Tensor):
    """If false, a step updates nothing, or a copy."""
    options = {"lr": 0.1, "foreach": kind == "foreach", "fused": kind == "fused"}
    want = nn.Parameter(plain.clone())
    shard = nn.Parameter(shard_of(plain))
    for p in (want, shard):
        p.grad = values(32, 48, seed=1, dtype=torch.float32)
        steps = optimizer([p], **options)
        steps.step()
        assert all(
            type(v) is Tensor
            for state in steps.state.values()
            for v in state.values()
            if isinstance(v, Tensor)
        )
    assert_same_bytes(plain, want.detach(), "memory that the shard is over")
    assert_same_bytes(shard.detach().inner, want.detach(), "shard")


def test_writes_are_counted_once(plain: Tensor):
    """If false, autograd does not refuse a weight that was written between the passes, or fq.hold
    does not see it."""
    shard = shard_of(plain)
    before = shard._version
    with torch.no_grad():
        assert shard.mul_(2) is shard
    assert shard._version > before
    before = shard._version
    torch._foreach_add_([shard], 1.0)
    assert shard._version > before
    before = shard._version
    assert (
        torch.add(plain, 1.0, out=shard) is shard
    )  # written by keyword, behind an option left out
    assert shard._version > before
    doubled = plain.clone()
    shard[2:4].zero_()
    assert_same_bytes(
        plain, torch.cat([doubled[:2], torch.zeros(2, 48), doubled[4:]]), "a view that was written"
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions_write_into_the_memory_of_a_shard(backend: str, plain: Tensor):
    """If false, torch.compile(optimizer.step) updates nothing, or a copy."""
    torch._dynamo.reset()

    @torch.compile(backend=backend, fullgraph=True)
    def write(t: Tensor) -> None:
        t.mul_(3).add_(1)

    want = plain * 3 + 1
    address = plain.data_ptr()
    shard = shard_of(plain)
    write(shard)
    assert shard.data_ptr() == address
    assert (plain - want).abs().max() <= 1e-6, "inductor may contract a product and a sum"
    assert torch.equal(shard.inner, plain)


# Under fully_shard #


def test_fully_shard_makes_shards_of_the_memory_that_optimizers_hold(mesh):
    """If false, accelerate and Trainer, which match parameters by address, train some of them, in
    silence."""
    model = nn.Sequential(linear(), fq.Linear(32, 48, recipe=RECIPE, name="second"))
    fully_shard(model, mesh=mesh)
    x = values(8, 48, dtype=torch.float32)
    for layer in model:
        local = layer.weight.to_local()
        assert isinstance(local, WeightShard) and local.state is layer._weight_state
        assert local.data_ptr() == layer.weight._local_tensor.data_ptr() != 0
    assert len({p.to_local().data_ptr() for p in model.parameters()}) == 4
    y = model(x)
    model.reshard()
    model[0].weight.to_local().detach().numpy()[:] *= 2  # no version tells
    fresh = nn.Sequential(linear(), fq.Linear(32, 48, recipe=RECIPE, name="second"))
    fresh.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    assert_same_bytes(model(x).detach(), fresh(x).detach(), "a write that nobody counts")
    assert not torch.equal(y, fresh(x))


def test_offloaded_shards_are_sent_as_they_are_copied(mesh, monkeypatch):
    """If false, a gather on a GPU encodes shards that are on the CPU, or weights whose shards need
    no copy are gathered with a launch per weight."""
    model = nn.Sequential(linear(), fq.Linear(32, 48, recipe=RECIPE, name="second"))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    model(values(8, 48, dtype=torch.float32))
    model.reshard()
    shards, sent = [layer.weight.to_local() for layer in model], []
    monkeypatch.setattr(
        GatherGroup,
        "send",
        lambda group, local, params, *rest: sent.append((group, local, params)),
    )
    fsdp_hooks._send(shards[0])
    (group, local, params) = sent.pop()
    assert len(group.members) == 2 and len(local) == len(params) == 4
    assert local[0].data_ptr() == shards[0].data_ptr()
    copied = shards[1].to("meta")  # stands for the device that computes
    fsdp_hooks._send(copied)
    (group, local, params) = sent.pop()
    assert len(local) == 1 and local[0] is copied
    assert [member.state for member in group.members] == [copied.state]
    assert params == [fsdp_hooks.managed_of(copied.state).param]


def test_training_gathers_again_what_an_evaluation_left_gathered(mesh):
    """If false, a training step records no amaxes of delayed scaling, or forwards that need no
    gather wait for one."""
    model = nn.Sequential(linear(recipes.fp8_delayed()))
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    x, gathers = values(8, 48, dtype=torch.float32), []
    for is_training in (False, False, True, True, False):
        counters.reset()
        with torch.set_grad_enabled(is_training):
            model(x)
        gathers.append(bool(counters.of("gather")))
    assert gathers == [True, False, True, False, False]


class _GradientInside(nn.Module):
    """x minus the gradient of a layer's energy, which its forward takes."""

    def __init__(self, recipe: fq.Recipe):
        super().__init__()
        self.layer = linear(recipe)

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.layer(x).tanh().sum(), x, retain_graph=True)
        return self.layer(x - slope)


def test_a_forward_may_take_gradients_where_its_layer_says_so(mesh):
    """If false, the remedy that the error names has no effect, or the layer reads freed codes."""
    x = values(8, 48, dtype=torch.float32).requires_grad_()
    whole = _GradientInside(recipes.mxfp8())
    for said in (None, "backward", True):
        model = _GradientInside(recipes.mxfp8())
        model.layer.recomputes_forward = said
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        if said is True:
            assert_same_bytes(model(x).detach(), whole(x).detach(), "output")
        else:
            with pytest.raises(StaleWeightError, match="columnwise codes.*recomputes_forward=True"):
                model(x)


def test_state_dicts_hold_plain_tensors(mesh):
    """If false, a checkpoint of a sharded model needs this library to be read."""
    model = nn.Sequential(linear())
    fully_shard(model, mesh=mesh)
    (key, value), *_ = model.state_dict().items()
    assert key == "0.weight" and type(value.to_local()) is Tensor
    assert value.to_local().data_ptr() == model[0].weight.to_local().data_ptr()


class _GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x @ w.T

    @staticmethod
    def backward(ctx, dy):
        return dy @ dy.new_zeros(dy.shape[1], 48), None


@pytest.mark.parametrize("stride", [(48, 1), (1, 32)], ids=["as the weight", "transposed"])
def test_local_tensors_have_the_gradients_of_torch(mesh, plain: Tensor, stride: tuple):
    """If false, an optimizer is given a gradient of other placements, strides or values than
    `DTensor.to_local` gives; or zeros of a weight whose layer accumulates its gradient itself,
    which momentum then takes."""
    given, gradients = plain.as_strided((32, 48), stride).clone(), []
    assert given.stride() == stride
    for read in (torch_compat.to_local, DTensor.to_local):
        weight = nn.Parameter(DTensor.from_local(plain, mesh, [Shard(0)]))
        local = read(weight)
        assert type(local) is Tensor and local.data_ptr() == plain.data_ptr()
        gradients += torch.autograd.grad(local, weight, given)
    ours, expected = gradients
    squared = torch_compat.to_local(weight).square().sum()
    (first,) = torch.autograd.grad(squared, weight, create_graph=True)
    assert first._spec == weight._spec
    (second,) = torch.autograd.grad(first.to_local().square().sum(), weight)
    assert_same_bytes(second.to_local(), 8 * plain, "gradient of a gradient")
    assert type(ours) is DTensor and ours._spec == expected._spec
    assert_same_bytes(ours.to_local(), given, "gradient")
    x = torch.ones(2, 48, requires_grad=True)
    _GivesNone.apply(x, torch_compat.to_local(weight)).sum().backward()
    assert x.grad is not None and weight.grad is None


# The weight of a layer that no one shards #


def test_a_weight_is_a_plain_parameter():
    """If false, what looks at a Parameter does otherwise than with nn.Linear's."""
    layer = linear()
    weight = layer.weight
    assert (
        type(weight) is nn.Parameter
        and weight.is_leaf
        and weight.data_ptr() == weight.untyped_storage().data_ptr() != 0
    )
    converted = fq.convert(nn.Sequential(nn.Linear(48, 32)), RECIPE)
    assert type(converted[0].weight) is nn.Parameter
    model = nn.Sequential(nn.Linear(48, 32))
    before, address = model[0].weight, model[0].weight.data_ptr()
    fq.convert(model, RECIPE)
    assert model[0].weight is before and before.data_ptr() == address, (
        "fq.convert leaves the parameter as it is"
    )


def test_functional_gradients_are_those_of_the_module():
    """If false, torch.func.grad through functional_call is refused, or gives other gradients."""
    layer, x, dy = (
        linear(recipes.mxfp8()),
        values(16, 48, dtype=torch.float32),
        values(16, 32, seed=1, dtype=torch.float32),
    )
    layer(x).backward(dy)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return (functional_call(layer, parameters, (x,)) * dy).sum()

    parameters = {n: p.detach() for n, p in layer.named_parameters()}
    for name, grad in torch.func.grad(loss)(parameters, x).items():
        assert_same_bytes(grad, layer.get_parameter(name).grad, name)


def test_data_of_a_weight_takes_another_dtype():
    """If false, a model cannot be cast through .data."""
    layer, x = linear(), values(16, 48, dtype=torch.float32)
    layer.weight.data = layer.weight.data.bfloat16()
    layer.bias.data = layer.bias.data.bfloat16()
    fresh = linear(dtype=torch.bfloat16)
    fresh.load_state_dict(layer.state_dict())
    assert layer.weight.dtype is torch.bfloat16
    assert_same_bytes(layer(x.bfloat16()), fresh(x.bfloat16()), "output")


def test_swapped_tensors_are_multiplied():
    """If false, torch.utils.swap_tensors, and .to() under its future, leave a layer on the weight
    before."""
    layer, other, x = (
        linear(),
        nn.Parameter(values(32, 48, seed=2, dtype=torch.float32)),
        values(16, 48, dtype=torch.float32),
    )
    layer(x)
    weight = layer.weight
    torch.utils.swap_tensors(weight, other)
    assert layer.weight is weight
    fresh = linear()
    fresh.load_state_dict(layer.state_dict())
    assert_same_bytes(weight.detach(), values(32, 48, seed=2, dtype=torch.float32), "swapped")
    assert_same_bytes(layer(x), fresh(x), "output")


def test_a_weight_is_shared_between_processes():
    """If false, model.share_memory() is refused, or the layer multiplies what it was."""
    layer, x = linear(), values(16, 48, dtype=torch.float32)
    want = layer(x).detach()
    layer.share_memory()
    assert layer.weight.is_shared()
    assert_same_bytes(layer(x).detach(), want, "output")


WRITERS = {
    "data": lambda w: w.data.mul_(2),
    "numpy": lambda w: w.detach().numpy().__imul__(2),
    "no_grad": lambda w: w.detach().mul_(2),
    "set_data": lambda w: setattr(w, "data", w.data * 2),
    "storage": lambda w: torch.empty(0).set_(w.detach().untyped_storage()).mul_(2),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_write_by_any_means_is_multiplied_by_the_next_forward(name: str):
    """If false, codes of a weight outlive it."""
    layer, x = linear(), values(16, 48, dtype=torch.float32)
    layer(x).sum().backward()
    WRITERS[name](layer.weight)
    fresh = linear()
    fresh.load_state_dict(layer.state_dict())
    assert not torch.equal(fresh.weight, linear().weight)
    assert_same_bytes(layer(x), fresh(x), name)
