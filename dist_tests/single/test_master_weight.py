"""`MasterWeight` in one process: whoever writes it, the next product reads it; everything else sees a parameter."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, values
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE
from fsdp_quant.tensor.master_weight import MasterWeight

RECIPES = {
    "fp8_current": recipes.fp8_current(), "mxfp8": recipes.mxfp8(), "mxfp8_nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "identity": recipes.identity(), "dequantized": recipes.mxfp8(backward_override="dequantized"),
}


@pytest.fixture(autouse=True)
def _own_step():
    """Each test starts at step 0 of seed 0, with empty counters."""
    with kept_step():
        STEP.seed, STEP.step, STEP.micro_batch, STEP.token_offset, STEP.counted_by_hand = 0, 0, 0, -1, True
        STEP.publish()
        counters.reset()
        yield


X, DY = values(24, 40, dtype=torch.float32), values(24, 48, seed=1, dtype=torch.float32)
OTHER = values(48, 40, seed=9, dtype=torch.float32)


def net(recipe: fq.Recipe, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(0)
    return fq.convert(nn.ModuleDict({"fc": nn.Linear(40, 48, dtype=dtype)}), recipe)


def both_directions(module: fq.Linear) -> tuple[Tensor, Tensor]:
    """Output and input gradient: the forward multiplies the rowwise codes, the backward the columnwise ones."""
    x = X.clone().to(module.weight.dtype).requires_grad_()
    y = module(x)
    y.backward(DY.to(y.dtype))
    return y.detach(), x.grad


def assert_reads(model: nn.ModuleDict, weight: Tensor, what: str) -> None:
    """The module computes what a fresh module with this weight computes."""
    fresh = net(model["fc"].recipe, model["fc"].weight.dtype)
    fresh.load_state_dict(model.state_dict() | {"fc.weight": weight.to(model["fc"].weight.dtype)})
    for got, want, part in zip(both_directions(model["fc"]), both_directions(fresh["fc"]), ("output", "input gradient")):
        assert_same_bytes(got, want, f"{part} after {what}")


# Writes #


def _copy(m):
    with torch.no_grad():
        m["fc"].weight.copy_(OTHER)


def _detached_copy(m):
    m["fc"].weight.detach().copy_(OTHER)


def _data_copy(m):
    m["fc"].weight.data.copy_(OTHER)


def _data_assignment(m):
    m["fc"].weight.data = torch.ones(48, 40)
    both_directions(m["fc"])
    m["fc"].weight.data = OTHER.clone()  # torch's counter is 0 for both


def _data_rows(m):
    m["fc"].weight.data[:] = OTHER
    m["fc"].weight.data[5:9] = OTHER[5:9]


def _load(m):
    m.load_state_dict(m.state_dict() | {"fc.weight": OTHER.clone()})


def _load_assign(m):
    m.load_state_dict(m.state_dict() | {"fc.weight": OTHER.clone()}, assign=True)


def _through_the_state_dict(m):
    m.state_dict()["fc.weight"].copy_(OTHER)


def _arithmetic(m):
    with torch.no_grad():
        m["fc"].weight.mul_(0.0).add_(OTHER)


def _view(m):
    with torch.no_grad():
        m["fc"].weight.view(-1).copy_(OTHER.view(-1))


def _transposed_view(m):
    with torch.no_grad():
        m["fc"].weight.t().copy_(OTHER.t())


def _rows(m):
    with torch.no_grad():
        for piece, source in zip(m["fc"].weight.split(17), OTHER.split(17)):
            piece.copy_(source)


def _unbound_rows(m):
    with torch.no_grad():
        for i, row in enumerate(m["fc"].weight.unbind(0)):
            row.copy_(OTHER[i])


def _selected_rows(m):
    with torch.no_grad():
        for i in range(48):
            m["fc"].weight[i].copy_(OTHER[i])


def _columns(m):
    with torch.no_grad():
        m["fc"].weight.narrow(1, 3, 20).zero_()


def _diagonal(m):
    with torch.no_grad():
        m["fc"].weight.diagonal().fill_(5.0)


def _data_transposed(m):
    m["fc"].weight.data.T.copy_(OTHER.t())


def _data_row(m):
    m["fc"].weight.data[3].zero_()


def _foreach(m):
    with torch.no_grad():
        torch._foreach_copy_([m["fc"].weight], [OTHER])


def _foreach_arithmetic(m):
    with torch.no_grad():
        torch._foreach_mul_([m["fc"].weight], 0.0)
        torch._foreach_add_([m["fc"].weight], [OTHER])


def _out(m):
    with torch.no_grad():
        torch.add(OTHER, 0.0, out=m["fc"].weight)


def _init(m):
    torch.manual_seed(77)
    nn.init.normal_(m["fc"].weight)


def _masked(m):
    with torch.no_grad():
        m["fc"].weight.masked_fill_(OTHER > 0, 0.25)


def _indexed(m):
    with torch.no_grad():
        m["fc"].weight[torch.tensor([3, 40])] = 1.5
        m["fc"].weight.index_add_(0, torch.tensor([0, 3]), OTHER[:2])


def _clamped(m):
    with torch.no_grad():
        m["fc"].weight.clamp_(-0.01, 0.01)


def _inference(m):
    with torch.inference_mode():
        m["fc"].weight.copy_(OTHER)


def _vector(m):
    flat = torch.cat((OTHER.flatten(), torch.zeros(48)))
    nn.utils.vector_to_parameters(flat, m.parameters())


def _half_sgd(m):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
    both_directions(m["fc"])
    optimizer.step()
    optimizer.zero_grad()


WRITES: dict[str, Callable] = {f.__name__.strip("_"): f for f in (
    _copy, _detached_copy, _data_copy, _data_assignment, _data_rows, _load, _load_assign, _through_the_state_dict,
    _arithmetic, _view, _transposed_view, _rows, _unbound_rows, _selected_rows, _columns, _diagonal, _data_transposed,
    _data_row, _foreach, _foreach_arithmetic, _out, _init, _masked, _indexed,
    _clamped, _inference, _vector, _half_sgd,
)}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_write_is_read_by_the_next_product(name: str, write: str):
    """Otherwise a GEMM multiplies codes of a weight that has changed: training or evaluation is silently stale."""
    m = net(RECIPES[name])
    before = both_directions(m["fc"])
    m.zero_grad()
    WRITES[write](m)
    after = m.state_dict()["fc.weight"].clone()
    if write not in ("init", "masked", "indexed", "clamped", "half_sgd", "columns", "diagonal", "data_row"):
        assert_same_bytes(after, OTHER, "the write itself")
    m.zero_grad()
    assert_reads(m, after, write)
    assert not torch.equal(both_directions(m["fc"])[0], before[0])


@pytest.mark.parametrize("name", RECIPES)
def test_codes_are_kept_while_nobody_writes(name: str):
    """Otherwise reads are taken for writes, and every use of the weight pays for another quantization."""
    m = net(RECIPES[name])
    both_directions(m["fc"])
    encoded = counters.of("weight encode")
    weight = m["fc"].weight
    for read in (weight.sum(), weight.detach() + 1, weight.norm(), weight.clone(), weight.t() @ OTHER, m.state_dict()):
        assert read is not None
    copy.deepcopy(m)
    both_directions(m["fc"])
    assert counters.of("weight encode") == encoded


def test_a_copied_weight_follows_its_own_writes():
    """Otherwise a parameter made from a clone keeps the codes of the original after it was written through its
    state dict, whose tensors are plain."""
    for copied in (lambda w: w.clone(), lambda w: w.to(torch.float32, copy=True), lambda w: copy.deepcopy(w)):
        m = net(recipes.mxfp8())
        both_directions(m["fc"])
        m["fc"].weight = nn.Parameter(copied(m["fc"].weight.detach()))
        both_directions(m["fc"])
        m.zero_grad()
        m.state_dict()["fc.weight"].copy_(OTHER)
        assert_reads(m, OTHER, "a write to the copy's state dict")


def test_averaged_models_read_their_average():
    """Otherwise evaluating an exponential moving average evaluates the weights it was copied from."""
    m = net(recipes.mxfp8())
    average = torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    module = average.module["fc"]
    both_directions(module)
    average.update_parameters(m)
    with torch.no_grad():
        m["fc"].weight.copy_(OTHER)
    average.update_parameters(m)
    first = net(recipes.mxfp8()).state_dict()["fc.weight"]
    assert_same_bytes(average.module.state_dict()["fc.weight"], first.lerp(OTHER, 0.5), "average")
    assert_reads(average.module, first.lerp(OTHER, 0.5), "averaging")


def test_swapping_in_an_average_and_back():
    """Otherwise evaluation with averaged weights, or the training after it, multiplies the other set."""
    m = net(recipes.hybrid("mxfp8", "nvfp4"))
    want = both_directions(m["fc"])
    kept = m["fc"].weight.detach().clone()
    with torch.no_grad():
        m["fc"].weight.copy_(OTHER)
    assert_reads(m, OTHER, "swap in")
    with torch.no_grad():
        m["fc"].weight.copy_(kept)
    for got, expected in zip(both_directions(m["fc"]), want):
        assert_same_bytes(got, expected, "swapped back")


def test_a_replaced_parameter_is_refused_or_read():
    """Otherwise a new nn.Parameter is multiplied in high precision, or its codes are the old parameter's."""
    m = net(recipes.mxfp8())
    both_directions(m["fc"])
    m["fc"].weight = nn.Parameter(OTHER.clone())
    with pytest.raises(ValueError, match="fc: its weight is a plain tensor"):
        m["fc"](X)
    lenient = net(recipes.mxfp8(strict=False))
    want = both_directions(lenient["fc"])
    lenient["fc"].weight = nn.Parameter(OTHER.clone())
    with pytest.warns(UserWarning, match="fc: its weight is a plain tensor"):
        got = both_directions(lenient["fc"])
    assert counters.total("departure") == 1
    fresh = net(recipes.mxfp8())
    fresh.load_state_dict(lenient.state_dict())
    for a, b, old in zip(got, both_directions(fresh["fc"]), want):
        assert_same_bytes(a, b, "replaced parameter")
        assert not torch.equal(a, old)


def test_data_of_another_shape_or_dtype_is_refused():
    """Otherwise the wrapper reports one dtype and multiplies another."""
    weight = net(recipes.mxfp8())["fc"].weight
    for value in (OTHER[:5], OTHER.bfloat16(), OTHER.to("meta")):
        with pytest.raises(ValueError, match=r"fc.weight.data is \[48, 40\] torch.float32 on cpu, got"):
            weight.data = value


# Between forward and backward #


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8", "mxfp8_nvfp4", "identity", "dequantized"])
@pytest.mark.parametrize(
    "write", ["copy", "data_assignment", "data_copy", "through_the_state_dict", "foreach", "view", "half"]
)
def test_a_weight_modified_before_its_backward_is_refused(name: str, write: str):
    """Otherwise the input's gradient is that of a weight that the forward never saw."""
    m = net(RECIPES[name])
    y = m["fc"](X.clone().requires_grad_())
    if write == "half":
        with torch.no_grad():
            m["fc"].weight.mul_(0.5)
    else:
        WRITES[write](m)
    with pytest.raises(fq.StaleWeightError, match="fc.weight was modified between the forward and the backward"):
        y.backward(DY)


def test_reading_a_weight_before_its_backward_is_fine():
    """Otherwise logging norms or saving a checkpoint between forward and backward breaks the step."""
    m = net(recipes.mxfp8())
    want = both_directions(m["fc"])
    x = X.clone().requires_grad_()
    y = m["fc"](x)
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    m["fc"].weight.norm()
    copy.deepcopy(m)
    with torch.no_grad():
        m["fc"](X * 3)
    y.backward(DY)
    assert_same_bytes(x.grad, want[1], "input gradient")


# Optimizers #

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stock_optimizers_train_the_master(name: str):
    """Otherwise an optimizer skips the wrapper, keeps quantized moments, or its step is not seen by the codes.

    Oracle: the same optimizer on a plain tensor that is fed the same gradients.
    """
    m = net(recipes.mxfp8())
    plain = [nn.Parameter(t.clone()) for t in m.state_dict().values()]
    optimizer, other = OPTIMIZERS[name](m.parameters()), OPTIMIZERS[name](plain)
    for step in range(3):
        both_directions(m["fc"])
        for p, q in zip(m.parameters(), plain):
            assert type(p.grad) is Tensor
            q.grad = p.grad.clone()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        assert_same_bytes(m.state_dict()["fc.weight"], plain[0].detach(), f"master after step {step}")
        assert_reads(m, plain[0].detach(), f"step {step}")
        m.zero_grad()
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    assert {type(t) for t in states} == {Tensor}
    for got, want in zip(optimizer.state_dict()["state"].values(), other.state_dict()["state"].values()):
        for key, value in want.items():
            if isinstance(value, Tensor):
                assert_same_bytes(got[key], value, key)


def test_lbfgs_trains_the_master():
    """Otherwise an optimizer that flattens parameters and evaluates a closure reads stale codes inside one step."""
    m = net(recipes.identity())
    torch.manual_seed(0)
    plain = nn.Linear(40, 48)
    for module in (m["fc"], plain):
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = (module(X) - DY).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same_bytes(m.state_dict()["fc.weight"], plain.state_dict()["weight"], "weight")


@pytest.mark.parametrize("foreach", [True, False])
def test_gradient_clipping_sees_plain_gradients(foreach: bool):
    """Otherwise clipping skips wrapped parameters, or hands out a norm of another class."""
    m = net(recipes.mxfp8())
    both_directions(m["fc"])
    grads = [p.grad.clone() for p in m.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3, foreach=foreach)
    want = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    assert type(norm) is Tensor
    torch.testing.assert_close(norm, want)
    for p, g in zip(m.parameters(), grads):
        torch.testing.assert_close(p.grad, g * (1e-3 / (want + 1e-6)))


def test_updates_smaller_than_a_format_step_accumulate():
    """Otherwise training stalls: an update of a thousandth of the format's step is lost when the codes are the weight.

    mxfp8's step at 1.0 is 2^-3; sixty-four updates of 2^-8 move the master by 2^-2, in fp32 without rounding.
    """
    def first_weight(m) -> float:
        """Element [0, 1] as the forward multiplies it."""
        with torch.no_grad():
            return float(m["fc"](torch.eye(40))[1, 0] - m["fc"].bias[0])

    m = net(recipes.mxfp8())
    with torch.no_grad():
        m["fc"].weight.fill_(1.0)
        m["fc"].weight[:, 0] = 1.75  # the block's scale
    optimizer = torch.optim.SGD(m.parameters(), lr=2.0**-8)
    seen = []
    for step in range(64):
        m["fc"].weight.grad = torch.full((48, 40), -1.0)
        seen.append(first_weight(m))
        optimizer.step()
    assert torch.equal(m.state_dict()["fc.weight"][:, 1:], torch.full((48, 39), 1.25))
    codes = sorted(set(round(v, 5) for v in seen))
    assert codes == [1.0, 1.125, 1.25]
    assert first_weight(m) == pytest.approx(1.25, abs=1e-6)


# Tied weights #


def tied_net(recipe: fq.Recipe) -> nn.ModuleDict:
    torch.manual_seed(0)
    m = nn.ModuleDict({"a": nn.Linear(32, 32, bias=False), "b": nn.Linear(32, 32, bias=False)})
    m["b"].weight = m["a"].weight
    return fq.convert(m, recipe)


def test_tied_weights_stay_tied():
    """Otherwise the two layers drift apart, or the second pays for its own codes and gradient."""
    m = tied_net(recipes.mxfp8())
    assert m["a"].weight is m["b"].weight
    assert [n for n, _ in m.named_parameters()] == ["a.weight"]
    assert set(m.state_dict()) == {"a.weight", "b.weight"}
    torch.manual_seed(0)
    layers = {name: nn.Linear(32, 32, bias=False) for name in ("a", "b")}
    alone = fq.convert(nn.ModuleDict(layers), recipes.mxfp8())
    alone["b"].load_state_dict(alone["a"].state_dict())
    x = values(8, 32, dtype=torch.float32)
    for each in (m, alone):
        counters.reset()
        y = each["b"](torch.relu(each["a"](x)))
        y.square().sum().backward()
        if each is m:
            out, encoded = y, counters.of("weight encode")
    assert_same_bytes(out, y, "output")
    assert encoded == {("a.weight", "rowwise"): 1, ("a.weight", "columnwise"): 1}
    torch.testing.assert_close(m["a"].weight.grad, alone["a"].weight.grad + alone["b"].weight.grad)
    torch.optim.SGD(m.parameters(), lr=0.1).step()
    assert m["a"].weight is m["b"].weight
    assert_same_bytes(m["a"](x), m["b"](x), "both layers read the step")
    m.load_state_dict(m.state_dict())
    copied = copy.deepcopy(m)
    assert copied["a"].weight is copied["b"].weight
    assert copied["a"].weight is not m["a"].weight


def test_tied_layers_keep_their_own_activation_histories():
    """Otherwise the layer with small inputs is scaled by the amax of the layer with large ones, and its inputs vanish.

    Two fp8 operands round within 2^-4 each, so a product is off by less than an eighth; a refusal will do as well.
    """
    try:
        m = tied_net(recipes.fp8_delayed(length=4))
    except ValueError as refused:
        assert "a.weight" in str(refused)
        return
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    small, large = values(8, 32, dtype=torch.float32), values(8, 32, dtype=torch.float32) * 1e7
    (m["a"](small).sum() + m["b"](large).sum()).backward()
    optimizer.step()
    want = small @ m.state_dict()["a.weight"].t()
    assert (m["a"](small) - want).norm() < want.norm() / 8


# Delayed scaling and loads #


def test_histories_survive_a_load():
    """Otherwise loading weights resets the scales of activations and gradients, which the weights do not hold."""
    for assign in (False, True):
        m = net(recipes.fp8_delayed(length=4))
        both_directions(m["fc"])
        torch.optim.SGD(m.parameters(), lr=0.0).step()
        before = {k: h["enc"].clone() for k, h in fq.state_dict(m)["histories"].items()}
        assert all(enc > 0 for enc in before.values())
        assert len(before) == 3
        m.load_state_dict({n: t.clone() for n, t in m.state_dict().items()}, assign=assign)
        for key, enc in before.items():
            assert_same_bytes(fq.state_dict(m)["histories"][key]["enc"], enc, f"{key}, assign={assign}")


# The tensor itself #


def test_operators_return_plain_tensors():
    """Otherwise gradients, logs and optimizer states carry the wrapper along, and are quantized when multiplied."""
    weight = net(recipes.mxfp8())["fc"].weight
    for made in (
        weight + 1, weight * 2.0, weight.sum(), weight @ weight.t(), weight.abs(), torch.zeros_like(weight), weight.float(),
        weight.norm(), torch.stack([weight, weight]), torch.cat([weight, weight]), weight > 0, weight.sqrt(),
    ):
        assert type(made) is Tensor or made is weight
    for alias in (weight.detach(), weight.data, weight[2:7], weight.view(-1, 40), weight.bfloat16(), weight.clone()):
        assert type(alias) is MasterWeight
        assert alias.state is weight.state
    assert_same_bytes(weight[2:7] + 0, weight.inner[2:7] + 0, "slice")
    assert_same_bytes(weight.bfloat16() + 0, weight.inner.bfloat16() + 0, "cast")


def test_gradients_of_the_weight_outside_the_layer():
    """Otherwise a penalty on the weight (L2, orthogonality) does not train it."""
    m = net(recipes.mxfp8())
    weight = m["fc"].weight
    (weight.square().sum() + (weight @ weight.t()).sum()).backward()
    plain = weight.inner.clone().requires_grad_()
    (plain.square().sum() + (plain @ plain.t()).sum()).backward()
    assert_same_bytes(weight.grad, plain.grad, "gradient")
    nn.functional.linear(X, weight).sum().backward()
    assert type(weight.grad) is Tensor


def test_versions_follow_writes_and_only_writes():
    """Otherwise the cache of codes is stale, or useless."""
    weight = net(recipes.mxfp8())["fc"].weight
    before = weight.version
    weight.detach() + 1
    assert weight.version == before
    assert weight.detach().version == before
    assert weight.data.version == before
    assert copy.deepcopy(weight).version != before
    clone = weight.detach().clone()
    assert clone.version == before  # equal values: codes may be shared
    clone.add_(1)
    assert clone.version != before
    assert weight.version == before
    views = [weight.detach().view(weight.shape), weight.detach()[:], *weight.detach().split(weight.shape[0])]
    assert all(view.version == before for view in views)  # what DTensor and FSDP2 make of a parameter
    weight.inner.add_(1)  # behind the wrapper's back: torch's own counter tells
    assert weight.version != before and all(view.version == weight.version for view in views)
    changed = weight.version
    with torch.no_grad():
        weight[3].zero_()
    assert weight.version not in (before, changed)


def test_weight_encodings_are_those_of_the_quantizer():
    """Otherwise the cached codes are not what the recipe's quantizer makes of `master.to(compute_dtype)`."""
    for recipe in (recipes.mxfp8(), recipes.nvfp4(), recipes.fp8_block(), recipes.mxfp8(compute_dtype=None),
                   recipes.mxfp8(compute_dtype=torch.float16)):
        module = net(recipe)["fc"]
        seen = module.weight.inner.to(recipe.compute_dtype or torch.float32)
        want = module.plan.weight.quantize(seen)
        for direction in (ROWWISE, COLUMNWISE):
            got = module.weight.state.whole_storage(module.weight, direction, torch.float32)
            for name, buffer in getattr(want, direction.value).buffers().items():
                assert_same_bytes(got.buffers()[name], buffer, f"{recipe} {direction} {name}")


def test_gradient_buffers_of_a_trainer_accumulate():
    """Otherwise a trainer that owns the gradients' memory (contiguous buffers) gets nothing, or breaks the backward."""
    m, want = net(recipes.mxfp8()), net(recipes.mxfp8())
    both_directions(want["fc"])
    both_directions(want["fc"])
    for make in (torch.zeros_like, lambda p: p.new_zeros(p.shape), lambda p: torch.zeros(p.shape)):
        for p in m.parameters():
            p.grad = make(p)
        buffers = [p.grad for p in m.parameters()]
        both_directions(m["fc"])
        both_directions(m["fc"])
        for p, q, buffer in zip(m.parameters(), want.parameters(), buffers):
            assert p.grad is buffer
            assert_same_bytes(p.grad + 0, q.grad, "accumulated")
