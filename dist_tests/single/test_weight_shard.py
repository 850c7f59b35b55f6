# SPDX-License-Identifier: Apache-2.0
"""`WeightShard`: a sharded weight is a tensor over its own memory; the weight of `fq.Linear` is
nn.Linear's Parameter."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.func import functional_call

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values
from fsdp_quant import recipes
from fsdp_quant.counters import counters
from fsdp_quant.tensor import fsdp_hooks
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
    "new_zeros": lambda t: t.new_zeros(4, 48),
    "clone": lambda t: t.clone(),
    "to": lambda t: t.to(torch.bfloat16),
    "as_strided": lambda t: t.as_strided((4, 48), (48, 1), 48),
    "empty_like": lambda t: torch.empty_like(t).zero_(),
}
PLAIN = {
    "add": lambda t: t + 1,
    "mul": lambda t: 2 * t,
    "t": lambda t: t.t(),
    "matmul": lambda t: t @ t.t(),
    "sum": lambda t: t.sum(0),
    "cat": lambda t: torch.cat([t, t]),
    "zeros_like": lambda t: torch.zeros_like(t),
    "lerp": lambda t: t.lerp(t, 0.5),
    "foreach": lambda t: torch._foreach_mul([t], 2.0)[0],
    "norm": lambda t: torch.nn.utils.get_total_norm([t]),
}


@pytest.mark.parametrize("name", KEEPS)
def test_views_and_copies_of_a_shard_are_shards(name: str, plain: Tensor):
    """If false, FSDP2 pads, splits or moves a weight and gathers it in high precision from then
    on."""
    shard = shard_of(plain)
    got, want = KEEPS[name](shard), KEEPS[name](plain)
    assert type(got) is WeightShard and got.state is shard.state
    assert_same_bytes(got.inner, want, name)
    shares = want.untyped_storage().data_ptr() == plain.untyped_storage().data_ptr()
    assert (got.data_ptr() == want.data_ptr()) is shares


@pytest.mark.parametrize("name", PLAIN)
def test_results_of_a_shard_are_plain(name: str, plain: Tensor):
    """If false, gradients and optimizer states are of a weight's class, and something quantizes
    them."""
    got = PLAIN[name](shard_of(plain))
    assert type(got) is Tensor
    assert_same_bytes(got, PLAIN[name](plain), name)


def test_inference_mode_is_left_for_shards_alone(plain: Tensor):
    """If false, FSDP2 keeps inference tensors of a first forward that evaluates, and no step may
    write them; or results of an evaluation are tracked as those of training."""
    shard = shard_of(plain)
    with torch.inference_mode():
        padded, doubled = shard.new_zeros(4, 48), shard * 2
    assert not padded.is_inference() and not padded.inner.is_inference()
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


def test_a_pickled_shard_returns(plain: Tensor):
    """If false, torch.save of a sharded model fails, or loses what the library knows of the
    weight."""
    shard, file = shard_of(plain).requires_grad_(), io.BytesIO()
    torch.save(shard, file)
    file.seek(0)
    for loaded in (pickle.loads(pickle.dumps(shard)), torch.load(file, weights_only=False)):
        assert type(loaded) is WeightShard and loaded.requires_grad
        assert (
            loaded.state.name == shard.state.name
            and loaded.state.quantizer == shard.state.quantizer
        )
        assert_same_bytes(loaded.detach().inner, plain, "values")


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


def test_state_dicts_hold_plain_tensors(mesh):
    """If false, a checkpoint of a sharded model needs this library to be read."""
    model = nn.Sequential(linear())
    fully_shard(model, mesh=mesh)
    (key, value), *_ = model.state_dict().items()
    assert key == "0.weight" and type(value.to_local()) is Tensor
    assert value.to_local().data_ptr() == model[0].weight.to_local().data_ptr()


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
