# SPDX-License-Identifier: Apache-2.0
"""`fq.optim.FusedAdam` against torch's AdamW, and quantized parameters in one process."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

import fsdp_quant as fq
from dist_tests import laws
from fsdp_quant.formats import Direction
from fsdp_quant.gemm import StaleWeightError
from fsdp_quant.linear import operands
from fsdp_quant.tensor.quantized_tensor import QuantizedTensor

SIZES = (1, 7, 64, 1000, 4099)
RECIPES = {
    "mxfp8/nvfp4": fq.recipes.hybrid("mxfp8", "nvfp4"),
    "fp8_current": fq.recipes.fp8_current(),
    "delayed": fq.recipes.fp8_delayed(length=2),
    "dequantized": fq.recipes.mxfp8(backward_override="dequantized"),
    "identity": fq.recipes.identity(),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(laws.values(n, seed=n, dtype=dtype)) for n in SIZES]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for p in params:
        p.grad = laws.values(
            p.numel(), seed=step * 31 + p.numel(), dtype=p.dtype, kind=("gauss", "heavy")[step % 2]
        )


def run(optimizer, params: list[nn.Parameter], steps=range(5)) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Where torch fuses, it rounds once and we twice: half an ulp (2^-24) an operation in each of
    up to 8 steps, of the value or of summands below 4, some of it once more through a quotient of
    about 1."""
    torch.testing.assert_close(got.detach(), want.detach(), rtol=8 * 2.0**-24, atol=4e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.9), (0.0, 0.5)])
@pytest.mark.parametrize("decoupled", [True, False])
def test_update_is_torchs_but_for_roundings(decay, betas, decoupled):
    """If false, changing to FusedAdam changes a run in other ways than its masters."""
    ours, theirs = parameters(), parameters()
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    options = {"lr": 1e-2, "betas": betas, "weight_decay": decay}
    a = fq.optim.FusedAdam(ours, **options, decoupled_weight_decay=decoupled)
    b = cls(theirs, **options, foreach=False)
    run(a, ours)
    run(b, theirs)
    for p, q in zip(ours, theirs):
        assert_near(p, q)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert_near(a.state[p][moment], b.state[q][moment])


def test_a_sparse_gradient_is_refused_before_anything_changes():
    """If false, a refused step is half made."""
    first, second = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = fq.optim.FusedAdam([{"params": [first]}, {"params": [second]}])
    first.grad, second.grad = torch.ones(4, 4), torch.ones(4, 4).to_sparse()
    with pytest.raises(ValueError, match="SparseAdam"):
        optimizer.step()
    assert torch.equal(first, torch.ones(4, 4)) and not any(
        optimizer.state[p]["step"] for p in (first, second)
    )


def test_low_precision_parameters_are_their_masters_rounded():
    """If false, updates below bf16's resolution are lost, or a bf16 model trains as another one
    than its fp32 twin."""
    ours, theirs = parameters(torch.bfloat16), parameters()
    with torch.no_grad():
        for p, q in zip(ours, theirs):
            q.copy_(p)
    a, b = fq.optim.FusedAdam(ours, lr=1e-4), torch.optim.AdamW(theirs, lr=1e-4, foreach=False)
    for step in range(8):
        give_gradients(ours, step)
        for p, q in zip(ours, theirs):
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        assert_near(a.state[p]["master"], q)
        laws.assert_same_bytes(p.detach(), a.state[p]["master"].bfloat16(), "parameter")


def test_a_parameter_written_by_hand_takes_its_master_along():
    """If false, a loaded or edited bf16 parameter is undone by the next step."""
    ours, fresh = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = fq.optim.FusedAdam(ours, lr=1e-2, betas=(0.0, 0.0))
    run(optimizer, ours, range(2))
    with torch.no_grad():
        for p, q in zip(ours, fresh):
            p.copy_(q.add_(1))  # other than what two steps have made of it
    # without memory: the step number is all that differs,
    again = fq.optim.FusedAdam(fresh, lr=1e-2, betas=(0.0, 0.0))
    run(optimizer, ours, [3])  # and 1 - 0^t is 1 for every t
    run(again, fresh, [3])
    for p, q in zip(ours, fresh):
        laws.assert_same_bytes(
            optimizer.state[p]["master"], again.state[q]["master"], "master after an edit"
        )


def test_capturable_steps_are_the_same_steps():
    """If false, a captured run is another run. Scalars are computed in fp64 on either side and
    rounded once."""
    results = []
    for capturable in (False, True):
        params = parameters()
        lr = torch.tensor(1e-2, dtype=torch.float64) if capturable else 1e-2
        optimizer = fq.optim.FusedAdam(params, lr=lr, capturable=capturable)
        run(optimizer, params)
        results.append([t for p in params for t in (p.detach(), *optimizer.state[p].values())])
    for got, want in zip(*reversed(results)):
        laws.assert_same_bytes(got, want, "capturable against host scalars")


@pytest.mark.parametrize("cut", [1, 5, 8, 13])
def test_update_of_a_shard_is_that_of_the_whole(cut):
    """If false, what a weight becomes depends on where the shards are cut."""
    grad = laws.values(37, seed=1, dtype=torch.float32)
    whole = nn.Parameter(laws.values(37, dtype=torch.float32))
    shards = [nn.Parameter(part.clone()) for part in (whole.detach()[:cut], whole.detach()[cut:])]
    optimizers = [fq.optim.FusedAdam([p], lr=1e-2) for p in (whole, *shards)]
    for step in range(4):
        whole.grad, shards[0].grad, shards[1].grad = (
            grad * step,
            grad[:cut] * step,
            grad[cut:] * step,
        )
        for optimizer in optimizers:
            optimizer.step()
    laws.assert_same_bytes(torch.cat([p.detach() for p in shards]), whole.detach(), f"cut at {cut}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trips_in_its_own_dtypes(dtype):
    """If false, resuming rounds masters or moments to the parameter's dtype."""
    ours = parameters(dtype)
    a = fq.optim.FusedAdam(ours, moment_dtype=torch.bfloat16)
    run(a, ours, range(2))
    file = io.BytesIO()
    torch.save({"optim": a.state_dict(), "params": [p.detach() for p in ours]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = [nn.Parameter(p) for p in saved["params"]]
    b = fq.optim.FusedAdam(resumed, lr=0.5, moment_dtype=torch.bfloat16)
    b.load_state_dict(saved["optim"])
    run(a, ours, range(2, 4))
    run(b, resumed, range(2, 4))
    for p, q in zip(ours, resumed):
        assert b.state[q]["exp_avg"].dtype is torch.bfloat16
        for key, value in a.state[p].items():
            laws.assert_same_bytes(b.state[q][key], value, key)
        laws.assert_same_bytes(q.detach(), p.detach(), "parameter")


def test_state_of_another_optimizer():
    """If false, torch's AdamW cannot be resumed from, or a missing master is made up."""
    ours, theirs = parameters(), parameters()
    b = torch.optim.AdamW(theirs, lr=1e-3, foreach=False)
    run(b, theirs, range(2))
    with torch.no_grad():
        for p, q in zip(ours, theirs):
            p.copy_(q)
    a = fq.optim.FusedAdam(ours)
    a.load_state_dict(b.state_dict())
    run(b, theirs, range(2, 4))
    run(a, ours, range(2, 4))
    for p, q in zip(ours, theirs):
        assert_near(p, q)
    low = parameters(torch.bfloat16)
    c = fq.optim.FusedAdam(low)
    before = copy.deepcopy(c.state_dict())
    with pytest.raises(ValueError, match="master"):
        c.load_state_dict(b.state_dict())
    assert str(c.state_dict()) == str(before), "a refused load changed the optimizer"


def a_frozen_base(source, target, ps):
    """Saved while all trained; loaded while the first is frozen, which trains again later."""
    run(source, ps, range(2))
    ps[0].requires_grad_(False)
    target.load_state_dict(source.state_dict())
    return range(2, 4)


def a_state_without(source, target, ps):
    """Loaded into an optimizer that has states of other parameters than the saved one."""
    ps[0].requires_grad_(False)
    run(source, ps[1:], range(2))
    run(target, ps, range(2, 4))
    target.load_state_dict(source.state_dict())
    return range(4, 6)


def an_empty_state(source, target, ps):
    """A fresh optimizer's state starts anew."""
    run(target, ps, range(2))
    target.load_state_dict(source.state_dict())
    return range(2, 4)


def a_rate_in_a_tensor(source, target, ps):
    """Saved by an optimizer whose rate a scheduler writes in place."""
    for group in source.param_groups:
        group["lr"] = torch.tensor(0.02)
    run(source, ps, range(2))
    target.load_state_dict(source.state_dict())
    return range(2, 4)


def a_hook_that_renames(source, target, ps):
    """torch's way to load states by names: a hook reads and changes the state."""
    run(source, ps, range(2))

    def swap(optimizer, state):
        assert all(isinstance(v["exp_avg"], torch.Tensor) for v in state["state"].values())
        return state | {"state": {len(ps) - 1 - i: v for i, v in state["state"].items()}}

    target.register_load_state_dict_pre_hook(swap)
    saved = source.state_dict()
    saved["state"] = {len(ps) - 1 - i: v for i, v in saved["state"].items()}
    steps = []
    target.register_load_state_dict_post_hook(
        lambda o: steps.extend(float(o.state[p]["step"]) for p in ps)
    )
    target.load_state_dict(saved)
    assert steps == [2.0] * len(ps)
    return range(2, 4)


@pytest.mark.parametrize(
    "program",
    [a_frozen_base, a_state_without, an_empty_state, a_rate_in_a_tensor, a_hook_that_renames],
)
def test_a_state_loads_as_into_torchs_adamw(program):
    """If false, moments of parameters that train later are dropped, or old ones are kept, which
    torch.optim.AdamW does not, in the same program."""
    results = []
    for cls, options in ((fq.optim.FusedAdam, {}), (torch.optim.AdamW, {"foreach": False})):
        ps = parameters()
        source, target = (cls(ps, lr=lr, **options) for lr in (1e-2, 3e-2))
        steps = program(source, target, ps)
        for p in ps:
            p.requires_grad_()
        run(target, ps, steps)
        results.append([(p, target.state[p]["step"], target.state[p]["exp_avg"]) for p in ps])
    for (p, step, first), (q, step_of_q, first_of_q) in zip(*results):
        assert float(step) == float(step_of_q)
        assert_near(p, q)
        assert_near(first, first_of_q)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.float8_e4m3fn])
def test_a_base_that_trains_later_resumes(
    dtype: torch.dtype, moments: torch.dtype, quantized: bool
):
    """If false, a run that was resumed while its base was frozen is not the run that went on."""

    def build(trains: bool) -> tuple[nn.Module, fq.optim.FusedAdam]:
        torch.manual_seed(0)
        with fq.quantized_model_init("mxfp8"):
            layer = (fq.Linear if quantized else nn.Linear)(64, 64, dtype=dtype)
        # a quantized parameter gives its master to an optimizer that is made while it trains
        layer.weight.requires_grad_(trains or quantized)
        optimizer = fq.optim.FusedAdam(layer.parameters(), lr=1e-2, moment_dtype=moments)
        layer.weight.requires_grad_(trains)
        return layer, optimizer

    def train(layer: nn.Module, optimizer, seed: int) -> None:
        for p in layer.parameters():
            p.grad = laws.values(*p.shape, seed=seed, dtype=p.dtype)
        optimizer.step()

    ours, first = build(trains=True)
    train(ours, first, 0)
    resumed, second = build(trains=False)
    resumed.load_state_dict(ours.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed.weight.requires_grad_()
    for net, optimizer in ((ours, first), (resumed, second)):
        train(net, optimizer, 1)
    for name, value in ours.state_dict().items():
        laws.assert_same_bytes(resumed.state_dict()[name], value, name)
    for p, q in zip(ours.parameters(), resumed.parameters()):
        for name, value in first.state[p].items():
            laws.assert_same_bytes(second.state[q][name], value, name)


@pytest.mark.parametrize("change", ["amsgrad", "shape"])
def test_a_state_that_does_not_fit_changes_nothing(change: str):
    """If false, another update runs in silence, or half of a state is loaded."""
    ps = parameters()
    source, target = torch.optim.AdamW(ps, amsgrad=change == "amsgrad"), fq.optim.FusedAdam(ps)
    run(source, ps, range(1))
    saved = source.state_dict()
    if change == "shape":
        saved["state"][len(ps) - 1]["exp_avg"] = torch.ones(1)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(
        ValueError, match="amsgrad=True, which" if change == "amsgrad" else "wanted"
    ):
        target.load_state_dict(saved)
    assert str(target.state_dict()) == str(before), "a refused load changed the optimizer"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "must not be negative"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"moment_dtype": torch.float16}, "moment_dtype"),
        ({"lr": torch.tensor(1.0)}, "capturable"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_bad_settings_are_refused(options, message):
    """If false, a setting is ignored or fails in the first step."""
    with pytest.raises(ValueError, match=message):
        fq.optim.FusedAdam(parameters(), **options)


# Quantized parameters #


def models(label: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """(ordinary, quantized) models of the same weights."""
    made = []
    for quantized in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(40, 33), nn.LayerNorm(33), nn.ReLU(), nn.Linear(33, 17, bias=False)
        ).to(dtype)
        if quantized:
            with fq.quantized_model_init(RECIPES[label]):
                fq.convert(net, RECIPES[label])
        else:
            fq.convert(net, RECIPES[label])
        made.append(net)
    return tuple(made)


def train(net: nn.Module, optimizer, steps=range(3)) -> torch.Tensor:
    for step in steps:
        fq.begin_step(step)
        y = net(laws.values(16, 40, seed=step, dtype=next(net.parameters()).dtype))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return y.detach()


@pytest.mark.parametrize("label", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_parameters_train_as_high_precision_ones(label, dtype):
    """If false, the kind of parameter decides what is multiplied."""
    ordinary, ours = models(label, dtype)
    a, b = (fq.optim.FusedAdam(net.parameters(), lr=1e-2) for net in (ordinary, ours))
    laws.assert_same_bytes(train(ours, b), train(ordinary, a), "output")
    for p, q in zip(ordinary.parameters(), ours.parameters()):
        master = a.state[p].get("master", p.detach())
        got = b.state[q].get("master", q.detach())
        if isinstance(q, QuantizedTensor):
            assert not isinstance(q.data.dequantize(), QuantizedTensor)
            laws.assert_same_bytes(
                got, master if type(master) is torch.Tensor else p.inner.detach(), "master"
            )
    for name, value in ordinary.state_dict().items():
        got = ours.state_dict()[name]
        laws.assert_same_bytes(got.to(value.dtype), value, f"{name} in the state dict")


def test_fq_linear_takes_the_recipe_of_the_context():
    """If false, a model built in the context is not quantized, or everything after it is."""
    with fq.quantized_model_init(RECIPES["mxfp8/nvfp4"]):
        inside = fq.Linear(32, 48)
    outside = fq.Linear(32, 48)
    assert isinstance(inside.weight, QuantizedTensor) and isinstance(inside.weight, nn.Parameter)
    assert inside.recipe == RECIPES["mxfp8/nvfp4"] and outside.recipe == fq.recipes.identity()
    assert not isinstance(outside.weight, QuantizedTensor)
    want = fq.HybridQuantizer("mxfp8", "nvfp4").quantize(inside.weight.inner.detach().bfloat16())
    for direction in Direction:
        got = inside.weight.storage_for(direction)
        for name, buffer in getattr(want, direction.value).buffers().items():
            laws.assert_same_bytes(got.buffers()[name], buffer, f"{direction} {name}")


def test_initial_values_go_to_the_optimizer():
    """If false, a quantized model holds a high-precision copy beside the master, or the master is a
    decoded code."""
    _, net = models("mxfp8/nvfp4")
    weight = net[0].weight
    values = weight.inner.detach().clone()
    optimizer = fq.optim.FusedAdam(net.parameters())
    laws.assert_same_bytes(optimizer.state[weight]["master"], values, "master")
    assert weight.inner is optimizer.state[weight]["master"], "the weight holds another copy"
    with pytest.raises(ValueError, match="another optimizer holds the master"):
        fq.optim.FusedAdam([weight])
    x = laws.values(16, 40, dtype=torch.float32)
    want, want_codes = net(x), fq.state_dict(net)["codes"]
    del optimizer
    gc.collect()
    laws.assert_same_bytes(net(x), want, "output of the codes alone")
    saved, codes = net.state_dict(), fq.state_dict(net)["codes"]
    laws.assert_same_bytes(saved["0.weight"], weight.dequantize(), "saved without values")
    assert type(saved["0.weight"]) is torch.Tensor and codes == want_codes
    with pytest.raises(StaleWeightError, match="keep the fq.optim optimizer"), torch.no_grad():
        weight.zero_()


def test_memory_of_a_quantized_parameter_is_shared():
    """If false, model.share_memory() kills the process, or leaves values or codes behind."""
    _, net = models("mxfp8/nvfp4")
    want = net(x := laws.values(16, 40, dtype=torch.float32))
    assert net.share_memory()[0].weight.is_shared() and net[0].weight.inner.is_shared()
    laws.assert_same_bytes(net(x), want, "shared")
    with pytest.raises(ValueError, match="no address of torch.float32 values"):
        net[0].weight.data_ptr()


def cloned(net: nn.Module) -> nn.Module:
    made = copy.deepcopy(net)
    made[0].weight, made[3].weight = (nn.Parameter(net[i].weight.detach().clone()) for i in (0, 3))
    return made


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "clone": cloned,
}


@pytest.mark.parametrize("taken", [False, True])
def test_copies_are_models_of_their_own(taken):
    """If false, an EMA or a pickled model shares or loses values."""
    _, net = models("mxfp8/nvfp4")
    optimizer = fq.optim.FusedAdam(net.parameters()) if taken else None
    x = laws.values(16, 40, dtype=torch.float32)
    want = net(x)
    for how, make in COPIES.items():
        made = make(net)
        assert isinstance(made[0].weight, QuantizedTensor), how
        with torch.no_grad():
            laws.assert_same_bytes(made(x), want, how)
            made[0].weight.mul_(2.0)
            laws.assert_same_bytes(net(x), want, f"the original after a write to its {how}")
            made[0].weight.lerp_(net[0].weight, 1.0)
            laws.assert_same_bytes(made(x), want, f"{how} written from the original's values")
    other = torch.empty_like(net[0].weight)
    with torch.no_grad():
        other.copy_(net[0].weight)
        other.mul_(2.0)
        laws.assert_same_bytes(net(x), want, "the original after a write to what it was copied to")
    assert optimizer is None or len(optimizer.state_dict()["state"]) == 5


def test_writes_reach_the_codes():
    """If false, a load or an edit by hand multiplies the codes of earlier values."""
    for taken in (False, True):
        ordinary, net = models("fp8_current")
        optimizer = fq.optim.FusedAdam(net.parameters()) if taken else None
        state = {k: v * 1.5 for k, v in ordinary.state_dict().items()}
        ordinary.load_state_dict(state)
        net.load_state_dict(state)
        x = laws.values(16, 40, dtype=torch.float32)
        laws.assert_same_bytes(net(x), ordinary(x), "output after load_state_dict")
        for model in (ordinary, net):
            with torch.no_grad():
                model[0].weight.data = state["0.weight"] * 0.25
        laws.assert_same_bytes(net(x), ordinary(x), "output after assigning .data")
        fq.set_recipe(net, RECIPES["mxfp8/nvfp4"])
        fq.set_recipe(ordinary, RECIPES["mxfp8/nvfp4"])
        laws.assert_same_bytes(net(x), ordinary(x), "output after set_recipe")
        y = net(x)
        with torch.no_grad():
            net[3].weight.mul_(2.0)
        with pytest.raises(StaleWeightError, match="between the forward and the backward"):
            y.sum().backward()
        assert optimizer is None or optimizer.state


def test_operators_never_decode_silently():
    """If false, a quantized parameter is read in high precision without anyone asking."""
    _, net = models("mxfp8/nvfp4")
    for use in (lambda w: w + 1, lambda w: w @ w.t(), lambda w: w.abs(), lambda w: w.float().sum()):
        with pytest.raises(NotImplementedError, match="dequantize"):
            use(net[3].weight)
    laws.assert_same_bytes(
        net[3].weight.norm(), net[3].weight.inner.norm(), "a norm, which is of the values"
    )
    assert operands.weight_state(net[0].weight) is net[0]._weight_state


def test_an_optimizer_without_masters_is_refused():
    """If false, a step updates nothing, or codes, without a word."""
    _, net = models("mxfp8/nvfp4")
    net(laws.values(16, 40, dtype=torch.float32)).sum().backward()
    for optimizer in (
        torch.optim.AdamW(net.parameters()),
        torch.optim.SGD(net.parameters(), lr=1.0),
    ):
        with pytest.raises(
            ValueError, match="0.weight is a quantized parameter.*fq.optim.FusedAdam"
        ):
            optimizer.step()
    net.requires_grad_(False)
    torch.optim.SGD(net.parameters(), lr=1.0).step()


def test_meta_construction():
    """If false, deferred initialization of one process trains nothing."""
    with torch.device("meta"):
        _, net = models("mxfp8/nvfp4")
    assert isinstance(net[0].weight, QuantizedTensor) and net[0].weight.is_meta
    net.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in net:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    ordinary, _ = models("mxfp8/nvfp4")
    a, b = (fq.optim.FusedAdam(m.parameters(), lr=1e-2) for m in (ordinary, net))
    laws.assert_same_bytes(train(net, b), train(ordinary, a), "output of the model made on meta")


def test_compiled_model_equals_eager():
    """If false, torch.compile multiplies other codes, or those of an earlier step."""
    results = []
    for compiled in (False, True):
        _, net = models("mxfp8/nvfp4")
        optimizer = fq.optim.FusedAdam(net.parameters(), lr=1e-2)
        results.append(
            train(torch.compile(net, backend="aot_eager") if compiled else net, optimizer)
        )
    laws.assert_same_bytes(results[1], results[0], "compiled against eager")
