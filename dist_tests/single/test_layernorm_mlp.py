# SPDX-License-Identifier: Apache-2.0
"""LayerNormLinear and LayerNormMLP: the bits of the separate modules, what they keep, and the
operators beneath."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, recorded_saves, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.linear.shared_input import GatedInput, Handed
from fsdp_quant.models.norm_op import activate, normalize
from fsdp_quant.ops import norm
from fsdp_quant.ops.norm import ACTIVATIONS, NormSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def doubled(role):
    """Columns are quantized from the decoded rows."""
    return fq.HybridQuantizer("mxfp8", "fp8_row", "rowwise_dequantized")


DTYPES = (BF16, FP16, FP32)
RECIPES = {
    "identity": recipes.identity(),
    "fp8_current": recipes.fp8_current(),
    "fp8_delayed": recipes.fp8_delayed(),
    "fp8_block": recipes.fp8_block(),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
    "high_precision": recipes.mxfp8(backward_override="high_precision"),
    "dequantized": recipes.fp8_row(backward_override="dequantized"),
    "doubled": fq.CustomRecipe(doubled),
}


def quick_gelu(x: Tensor) -> Tensor:
    values = x.float()
    return (values * torch.sigmoid(1.702 * values)).to(x.dtype)


PLAIN = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "qgelu": quick_gelu,
    "clamped_silu": lambda x: quick_gelu(x.clamp(max=7.0)),
}
D, HIDDEN, TOKENS = 48, 64, 32


@pytest.fixture(autouse=True)
def _own_step():
    """Each test starts at step 0 of seed 0."""
    with kept_step():
        restart()
        yield


def restart() -> None:
    STEP.seed, STEP.step, STEP.micro_batch = 0, 0, 0
    STEP.publish()


def plain_activation(name: str, g: Tensor, u: Tensor | None) -> Tensor:
    if name == "clamped_swiglu":  # gpt-oss
        u = u.clamp(-7.0, 7.0) + 1
    return PLAIN[norm.GATED[name]](g) * u if ACTIVATIONS[name].gated else PLAIN[name](g)


class Separate(nn.Module):
    """What LayerNormMLP is made of, as users write it."""

    def __init__(
        self, activation: str, normalization: str, bias: bool, residual: bool, dtype: torch.dtype
    ):
        super().__init__()
        kind = nn.LayerNorm if normalization == "LayerNorm" else nn.RMSNorm
        self.activation, self.residual, self.norm = (
            activation,
            residual,
            kind(D, eps=1e-5, dtype=dtype),
        )
        self.gate_proj = (
            nn.Linear(D, HIDDEN, bias, dtype=dtype) if ACTIVATIONS[activation].gated else None
        )
        self.up_proj = nn.Linear(D, HIDDEN, bias, dtype=dtype)
        self.down_proj = nn.Linear(HIDDEN, D, bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        up = self.up_proj(n)
        h = plain_activation(
            self.activation, up if self.gate_proj is None else self.gate_proj(n), up
        )
        y = self.down_proj(h)
        return x + y if self.residual else y


def both(
    recipe: fq.Recipe,
    activation: str = "swiglu",
    normalization: str = "RMSNorm",
    bias: bool = False,
    residual: bool = False,
    dtype: torch.dtype = BF16,
    **options,
) -> tuple[nn.Module, fq.LayerNormMLP]:
    """Separate modules and the fused one, with the same weights, and the same names for their
    random bits."""
    torch.manual_seed(0)
    separate = Separate(activation, normalization, bias, residual, dtype)
    for parameter in separate.norm.parameters():
        nn.init.normal_(parameter, 1.0)
    fused = fq.LayerNormMLP(
        D,
        HIDDEN,
        activation,
        bias,
        normalization,
        residual=residual,
        dtype=dtype,
        recipe=recipe,
        name="mlp",
        **options,
    )
    fused.load_state_dict(separate.state_dict())
    fq.convert(nn.ModuleDict({"mlp": separate}), recipe)
    return separate, fused


def step(
    module: nn.Module, x: Tensor, dy: Tensor, context=contextlib.nullcontext, first=True
) -> dict[str, Tensor]:
    """Output and every gradient of one forward and backward. first: of step 0; else of the step
    that follows."""
    if first:
        restart()
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with context():
        y = module(x)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad} | {
        n: p.grad.clone() for n, p in module.named_parameters()
    }


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    for name, tensor in want.items():
        assert_same_bytes(got[name], tensor, name)


def inputs(dtype: torch.dtype = BF16, *lead: int) -> tuple[Tensor, Tensor]:
    shape = (*(lead or (TOKENS,)), D)
    return values(*shape, seed=4, dtype=dtype), values(*shape, seed=5, dtype=dtype)


# The operators #


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_equals_torchs_autograd(name: str, dtype: torch.dtype):
    """Otherwise fusing an activation changes what a model computes, or its gradients."""
    g, u, dh = (4 * values(33, 40, seed=i, dtype=dtype) for i in range(3))
    assert min(g.max(), u.max(), -u.min()) > norm.LIMIT  # clamped_swiglu clamps some
    g[0, :3] = torch.tensor([0.0, float("nan"), float("inf")])
    g, u = g.requires_grad_(), u.requires_grad_() if ACTIVATIONS[name].gated else None
    given = [t for t in (g, u) if t is not None]
    h = plain_activation(name, g, u)
    want = torch.autograd.grad(h, given, dh)
    kind = ACTIVATIONS[name].kind
    assert_same_bytes(norm.activation(g.detach(), u if u is None else u.detach(), kind)[0], h, "h")
    *gradients, amaxes = norm.activation_backward(
        dh, *(t if t is None else t.detach() for t in (g, u)), kind
    )
    assert amaxes is None
    for got, wanted, what in zip(gradients, want, ("dg", "du")):
        assert_same_bytes(got, wanted, what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", (nn.RMSNorm, nn.LayerNorm))
def test_norm_equals_torchs_autograd(kind: type, dtype: torch.dtype):
    """Otherwise a fused module is another model than the one with torch's norm."""
    plain = kind(D, eps=1e-5, dtype=dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, 1.0)
    x, dy = inputs(dtype, 3, 7)
    x, bias, spec = (
        x.requires_grad_(),
        getattr(plain, "bias", None),
        NormSpec(1e-5, kind is nn.LayerNorm, False),
    )
    y = plain(x)
    want = torch.autograd.grad(y, [x, *plain.parameters()], dy)
    with torch.no_grad():
        made = norm.norm(x, plain.weight, bias, spec)
        residual = values(3, 7, D, seed=6, dtype=dtype)
        for rest in (None, residual):
            got = norm.norm_backward(dy, x, plain.weight, bias, rest, made.rstd, made.mean, spec)
            # of which autograd adds the terms in another order
            if rest is None or dtype is not FP32:
                assert_same_bytes(got.dx, want[0] if rest is None else want[0] + rest, "dx")
            assert_same_bytes(got.dweight, want[1], "dweight")
            if bias is not None:
                assert_same_bytes(got.dbias, want[2], "dbias")
    assert_same_bytes(made.y, y, "y")


@pytest.mark.parametrize("normalization", ("RMSNorm", "LayerNorm"))
def test_zero_centered_gamma_is_one_plus_the_weight(normalization: str):
    """Otherwise weight decay pulls gamma to another value than 1, or small weights are lost to
    rounding."""
    centred, plain = (
        fq.Norm(D, normalization, zero_centered_gamma=z, dtype=FP32) for z in (True, False)
    )
    assert not centred.weight.any()
    with torch.no_grad():
        centred.weight.copy_(values(D, seed=1, dtype=FP32) / 64)
        plain.weight.copy_(centred.weight + 1)
    x, dy = inputs(FP32)
    assert_same(step(centred, x, dy), step(plain, x, dy))
    with torch.no_grad():  # 1 + 2^-9 is no bf16 number
        low = fq.Norm(D, normalization, zero_centered_gamma=True, dtype=BF16)
        low.weight.fill_(2**-9)
        x = torch.full((1, D), 3.0, dtype=BF16)
        x[0, ::2] = -3.0
        y = norm.reference_norm(x, low.weight, low.bias, low.spec)[0]
        exact = (
            x.double() * torch.rsqrt(torch.tensor(9 + 1e-5, dtype=torch.float64)) * (1 + 2**-9)
        ).to(BF16)
    assert_same_bytes(y, exact, "y")


# The modules #


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(a, d) for a in ACTIVATIONS for d in DTYPES if d is BF16 or a in ("swiglu", "gelu")],
)
def test_identity_mlp_equals_the_plain_modules(activation: str, dtype: torch.dtype):
    """Otherwise a baseline run with the identity recipe is not the run without the library."""
    for normalization, bias, residual in (("RMSNorm", False, True), ("LayerNorm", True, False)):
        _, fused = both(recipes.identity(), activation, normalization, bias, residual, dtype)
        torch.manual_seed(0)
        plain = Separate(activation, normalization, bias, residual, dtype)
        plain.load_state_dict(fused.state_dict())
        for lead in ((TOKENS,), (2, 9)):
            x, dy = inputs(dtype, *lead)
            assert_same(step(fused, x, dy), step(plain, x, dy))


def test_identity_modules_equal_the_plain_ones_under_torch_autocast():
    """Otherwise mixed precision through torch.autocast rounds elsewhere once modules are fused."""

    def context():
        return torch.autocast("cpu", dtype=BF16)

    x, dy = inputs(FP32)
    for normalization in ("RMSNorm", "LayerNorm"):
        _, fused = both(recipes.identity(), "swiglu", normalization, True, True, FP32)
        plain = Separate("swiglu", normalization, True, True, FP32)
        plain.load_state_dict(fused.state_dict())
        assert_same(step(fused, x, dy, context), step(plain, x, dy, context))


@pytest.mark.parametrize("name", RECIPES)
def test_mlp_equals_separate_modules_of_the_recipe(name: str):
    """Otherwise a recipe means something else in a fused module; two steps, so that histories and
    random bits count."""
    for activation, normalization, bias, residual in (
        ("swiglu", "RMSNorm", False, True),
        ("gelu", "LayerNorm", True, False),
    ):
        separate, fused = both(RECIPES[name], activation, normalization, bias, residual)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (separate, fused)]
        for lead in ((TOKENS,), (2, 16)):
            x, dy = inputs(BF16, *lead)
            assert_same(step(fused, x, dy), step(separate, x, dy))
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("normalization", ("RMSNorm", "LayerNorm"))
def test_layernorm_linear_equals_norm_and_linear(normalization: str):
    """Otherwise fusing a norm with its linear layer changes bits; the norm's output is the one that
    was multiplied."""
    x = inputs()[0]
    for recipe in (recipes.identity(), recipes.mxfp8(), RECIPES["doubled"]):
        torch.manual_seed(0)
        module = fq.LayerNormLinear(
            D,
            D,
            normalization=normalization,
            return_layernorm_output=True,
            dtype=BF16,
            recipe=recipe,
        )
        plain = (nn.LayerNorm if normalization == "LayerNorm" else nn.RMSNorm)(
            D, eps=1e-5, dtype=BF16
        )
        linear = nn.Linear(D, D, dtype=BF16)
        plain.load_state_dict(
            {k.removeprefix("norm."): v for k, v in module.state_dict().items() if "norm" in k}
        )
        linear.load_state_dict(
            {k.removeprefix("linear."): v for k, v in module.state_dict().items() if "linear" in k}
        )
        fq.convert(linear_in := nn.ModuleDict({"linear": linear}), recipe)
        normal = plain(x)
        want = linear_in["linear"](normal)
        got, returned = module(x)
        assert_same_bytes(got, want, "y")
        assert_same_bytes(returned, normal, "normal")
        (got.float().sum() + returned.float().square().sum()).backward()
        (want.float().sum() + normal.float().square().sum()).backward()
        assert_same_bytes(module.linear.weight.grad, linear.weight.grad, "dw")
        assert_same_bytes(module.norm.weight.grad, plain.weight.grad, "dgamma")


@pytest.mark.parametrize(
    "name", ("identity", "fp8_current", "mxfp8", "high_precision", "dequantized")
)
def test_mlp_keeps_what_the_plan_says(name: str):
    """Otherwise a fused module holds more than x, gate, up and the operands of wgrad: act(gate) and
    h are made again."""
    _, fused = both(RECIPES[name], residual=True)
    x = inputs()[0].requires_grad_()
    with recorded_saves() as saved:
        fused(x)
    keeps_inputs = fused.down_proj.plan.saves == "input"
    wide = [t for t in saved if t.dtype is BF16 and t.shape == (TOKENS, HIDDEN)]
    narrow = {t.data_ptr() for t in saved if t.dtype is BF16 and t.shape == (TOKENS, D)}
    # gate, up; h where wgrad multiplies it
    assert len(wide) == 2 + keeps_inputs, [tuple(t.shape) for t in saved]
    assert len(narrow) == 1 + keeps_inputs  # x; the norm's output, once for both
    assert {
        tuple(t.shape) for t in saved if t.dtype is FP32 and t.dim() == 1 and t.numel() > 1
    } == {(TOKENS,)}  # rstd


def test_mlp_state_dict_has_the_usual_names():
    """Otherwise checkpoints of plain models need a translation."""
    plain = Separate("swiglu", "LayerNorm", True, False, BF16)
    fused = fq.LayerNormMLP(D, HIDDEN, dtype=BF16, recipe=recipes.mxfp8())
    assert list(fused.state_dict()) == list(plain.state_dict())
    llamas = {"bias": False, "normalization": "RMSNorm"}
    assert list(fq.LayerNormMLP(D, HIDDEN, "relu_squared", **llamas).state_dict()) == [
        "norm.weight",
        "up_proj.weight",
        "down_proj.weight",
    ]


def test_fused_modules_have_one_set_of_defaults():
    """If false, a model that leaves options out has another norm, or biases, in its MLPs than in
    its projections, or a docstring says other defaults."""
    kinds = fq.LayerNormLinear, fq.LayerNormMLP
    linear, mlp = (
        {p.name: p.default for p in inspect.signature(kind).parameters.values()} for kind in kinds
    )
    shared = {name: linear[name] for name in linear.keys() & mlp.keys()}
    assert shared == {name: mlp[name] for name in shared}
    for kind in kinds:
        paragraph = inspect.getdoc(kind).split("\n\n")[1]
        stated = re.findall(r'(\w+)="?([\w-]+)', paragraph)[:4]
        assert [name for name, _ in stated] == [
            "bias",
            "normalization",
            "eps",
            "zero_centered_gamma",
        ]
        assert [shared[name] for name, _ in stated] == [True, "LayerNorm", 1e-5, False]
        assert [value for _, value in stated] == ["True", "LayerNorm", "1e-5", "False"]


def test_mlp_follows_a_change_of_recipe():
    """Otherwise a schedule leaves the linear layers inside fused modules behind."""
    x, dy = inputs()
    _, changed = both(recipes.fp8_current())
    step(changed, x, dy)
    fq.set_recipe(changed, recipes.mxfp8())
    _, fresh = both(recipes.mxfp8())
    assert_same(step(changed, x, dy), step(fresh, x, dy))


@pytest.mark.parametrize("reentrant", (False, True))
def test_mlp_checkpointing_changes_no_bit(reentrant: bool):
    """Otherwise recomputed activations differ from those of the forward."""
    x, dy = inputs()
    for name in ("fp8_delayed", "nvfp4"):
        _, fused = both(RECIPES[name], residual=True)

        class Again(nn.Module):
            def __init__(self, inner: nn.Module):
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(self.inner, x, use_reentrant=reentrant)

        want = step(copy.deepcopy(fused), x, dy)
        got = {k.removeprefix("inner."): v for k, v in step(Again(fused), x, dy).items()}
        assert_same(got, want)


@pytest.mark.parametrize(
    "name", ("identity", "fp8_delayed", "mxfp8", "nvfp4", "high_precision", "dequantized")
)
def test_recomputed_gate_and_up_change_no_bit(name: str):
    """Otherwise recompute="gate_up" trains another model: other codes, histories or random bits in
    the backward."""
    for activation, bias, residual in (("swiglu", False, True), ("gelu", True, False)):
        recomputing, keeping = (
            both(RECIPES[name], activation, bias=bias, residual=residual, recompute=r)[1]
            for r in ("gate_up", None)
        )
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (recomputing, keeping)]
        for lead in ((TOKENS,), (2, 16)):
            x, dy = inputs(BF16, *lead)
            assert_same(step(recomputing, x, dy), step(keeping, x, dy))
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("name", ("fp8_current", "fp8_delayed", "mxfp8"))
def test_recomputed_gate_and_up_change_no_bit_in_compiled_steps(name: str):
    """Otherwise codes of weights that the backward makes again differ from those of the forward, on
    a GPU alone."""
    x, dy = inputs()
    with hopper.emulated():
        recomputing, keeping = (
            both(RECIPES[name], residual=True, recompute=r)[1] for r in ("gate_up", None)
        )
        for _ in range(2):
            assert_same(step(recomputing, x, dy), step(keeping, x, dy))


def test_recomputed_gate_and_up_are_not_kept():
    """Otherwise recompute="gate_up" costs its time and saves no memory."""
    _, fused = both(recipes.mxfp8(), residual=True, recompute="gate_up")
    x = inputs()[0].requires_grad_()
    with recorded_saves() as saved:
        fused(x)
    assert all(t.shape[-1] != HIDDEN for t in saved if t.dtype is BF16), [
        tuple(t.shape) for t in saved
    ]
    with pytest.raises(ValueError, match="recompute must be None or 'gate_up', got 'down'"):
        fq.LayerNormMLP(D, HIDDEN, recompute="down")


def test_compiled_recomputation_equals_the_eager_one():
    """Otherwise recompute="gate_up" breaks the graph of a compiled model, or changes its bits."""
    torch._dynamo.reset()
    _, fused = both(recipes.mxfp8(), residual=True, recompute="gate_up")
    x, dy = inputs()
    want = step(fused, x, dy)
    compiled = torch.compile(copy.deepcopy(fused), fullgraph=True, backend="aot_eager")
    assert_same({k.removeprefix("_orig_mod."): v for k, v in step(compiled, x, dy).items()}, want)


@pytest.mark.parametrize(
    ("name", "activation", "normalization"),
    [("identity", "swiglu", "RMSNorm"), ("mxfp8", "gelu", "LayerNorm")],
)
def test_compiled_mlp_equals_the_eager_one(name: str, activation: str, normalization: str):
    """Otherwise torch.compile breaks a graph at a fused module, or changes its bits; train and
    evaluation."""
    torch._dynamo.reset()
    _, fused = both(RECIPES[name], activation, normalization, True, True)
    x, dy = inputs()
    want = step(fused, x, dy)
    compiled = torch.compile(copy.deepcopy(fused), fullgraph=True, backend="aot_eager")
    got = {k.removeprefix("_orig_mod."): v for k, v in step(compiled, x, dy).items()}
    assert_same(got, want)
    with torch.no_grad():
        assert_same_bytes(compiled(x), fused(x), "evaluation")


@pytest.mark.parametrize("normalization", ("RMSNorm", "LayerNorm"))
def test_transforms_of_torch_differentiate_the_fused_mlp(normalization: str):
    """Otherwise torch.func.grad fails in the norm or the activation, or has other gradients; one
    that no product has names the layer."""
    _, fused = both(RECIPES["fp8_delayed"], "swiglu", normalization, residual=True, dtype=FP32)
    x, dy = inputs(FP32)
    weights = {n: p.detach() for n, p in fused.named_parameters()}
    restart()
    got, dx = torch.func.grad(
        lambda w, x: (torch.func.functional_call(fused, w, (x,)) * dy).sum(), argnums=(0, 1)
    )(weights, x)
    want = step(fused, x, dy)
    for name, gradient in (got | {"dx": dx}).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-5, atol=1e-5, msg=name)
    for run in (
        lambda: torch.func.jvp(fused, (x,), (x,)),
        lambda: torch.func.vmap(fused)(x[None]),
    ):
        with pytest.raises(NotImplementedError, match=r"^mlp\.gate_proj: torch\.func"):
            run()


def test_frozen_norm_and_input_without_gradient():
    """Otherwise LoRA on a frozen base, or the first layer, computes or asks for gradients that
    nobody reads."""
    x, dy = inputs()
    separate, fused = both(recipes.mxfp8(), residual=True)
    for module in (separate, fused):
        module.norm.weight.requires_grad_(False)
        module(x).backward(dy)
        assert module.norm.weight.grad is None and x.grad is None
    assert_same_bytes(fused.up_proj.weight.grad, separate.up_proj.weight.grad, "dw")


def test_wrong_options_are_refused():
    """Otherwise a misspelt activation or normalization trains another model."""
    with pytest.raises(ValueError, match="activation must be one of .*swiglu.*, got 'swish'"):
        fq.LayerNormMLP(D, HIDDEN, "swish")
    with pytest.raises(
        ValueError, match="normalization must be 'RMSNorm' or 'LayerNorm', got 'rms'"
    ):
        fq.LayerNormLinear(D, D, normalization="rms")
    with pytest.raises(ValueError, match=r"LayerNorm: input is \[3, 40\], its last dim must be 48"):
        fq.LayerNormMLP(D, HIDDEN)(torch.zeros(3, 40))


# On a Hopper GPU, emulated #


@pytest.mark.parametrize("name", ("fp8_current", "mxfp8"))
def test_kernels_of_an_mlp_read_each_tensor_once(name: str):
    """Otherwise a tensor between two products is read more often than it must be, or its amax is
    not that of its values."""
    x, dy = inputs(BF16, 2, 16)
    _, fused = both(RECIPES[name], residual=True)
    want = step(fused, x, dy)
    with hopper.emulated() as operators:
        _, fused = both(RECIPES[name], residual=True)
        got = step(fused, x, dy)
        counts = {
            n: operators.count(n)
            for n in ("norm", "norm_backward", "activation", "activation_backward", "amaxes")
        }
        # Handed over: n to gate and up (which takes gate's codes), and the gradients of both.
        assert counts == {
            "norm": 1,
            "norm_backward": 1,
            "activation": 0,
            "activation_backward": 1,
            "amaxes": 4,
        }
        assert len(operators.steps()) == 6  # three layers, forward and backward
        made = [c for c in operators.calls if c.name in ("linear_step", "linear_gated") and c.row]
        assert len(made) == 2  # gate and up share the codes of the norm's output
    error = (got["y"].double() - want["y"].double()).norm() / want["y"].double().norm()
    assert error < 2e-2  # products of codes round to bf16 once, in another order


def test_gate_and_up_share_codes_of_one_history():
    """Otherwise delayed scaling quantizes a norm's output twice and keeps it twice, or gate is
    scaled by another's amaxes."""

    def made(operators, module: nn.Module, x: Tensor, dy: Tensor) -> tuple[int, dict[str, Tensor]]:
        before = len(operators.calls)
        results = step(module, x, dy, first=False)
        return len(
            [
                c
                for c in operators.calls[before:]
                if c.name in ("linear_step", "linear_gated") and c.row
            ]
        ), results

    recipe = recipes.fp8_delayed(length=2)
    restart()
    with hopper.emulated() as operators:
        separate, fused = both(recipe, residual=True)
        for i in range(4):
            if i == 1:
                fused = copy.deepcopy(fused)
            if i == 3:  # its history goes with it
                fused.up_proj = copy.deepcopy(fused.up_proj)
            x, dy = (t * 2.0**i for t in inputs())
            (count, got), (apart, want) = (made(operators, m, x, dy) for m in (fused, separate))
            assert (count, apart) == (3 if i == 3 else 2, 3), f"step {i}"
            if i < 3:
                assert_same(got, want)
            for module in (separate, fused):
                torch.optim.SGD(module.parameters(), lr=0.1).step()
        histories = fq.state_dict(fused)["histories"]
        for slot in ("input.rowwise", "grad_output.rowwise"):
            assert torch.isfinite(histories[f"gate_proj.{slot}"]["enc"]).all()


def test_who_looks_at_the_last_layer_sees_its_input():
    """Otherwise a hook, a debugger or another recipe reads an input of the last layer that was
    never written."""
    x, dy = inputs(BF16, 2, 16)
    with hopper.emulated() as operators:
        _, fused = both(RECIPES["fp8_block"])
        want, seen = step(fused, x, dy), []
        assert operators.count("activation") == 0
        hook = fused.down_proj.register_forward_pre_hook(
            lambda module, args: seen.append(args[0].detach())
        )
        got = step(fused, x, dy)
        hook.remove()
        assert (
            operators.count("activation") == 1
            and seen[0].is_contiguous()
            and seen[0].count_nonzero() > 0
        )
        for what, tensor in want.items():
            assert_same_bytes(got[what], tensor, what)
        with fq.autocast(RECIPES["fp8_block"]):
            step(fused, x, dy)
        assert operators.count("activation") == 2
        odd = seen[0].flatten(0, -2)[:15]
        with pytest.raises(ValueError, match="input of this layer has no values"):
            fused.down_proj(odd, Handed(source=GatedInput(odd, odd, 2)))


@pytest.mark.parametrize("activation", ["clamped_swiglu", "glu", "qgeglu", "sreglu"])
def test_an_activation_without_a_kernel_runs_by_torchs_operators(activation: str):
    """Otherwise its MLP dies on a GPU, or gate and up are scaled by amaxes that nobody wrote."""
    with hopper.emulated() as operators:
        separate, fused = both(RECIPES["fp8_block"], activation)
        has_kernel, (x, dy) = ACTIVATIONS[activation].has_kernel, inputs(BF16, 2, 16)
        got, want = (step(module, 4 * x, dy) for module in (fused, separate))
        counts = [operators.count(name) for name in ("activation", "activation_backward")]
        assert has_kernel or counts == [0, 0]
        for what in () if has_kernel else want:
            assert_same_bytes(got[what], want[what], what)
    error = (got["y"].double() - want["y"].double()).norm() / want["y"].double().norm()
    assert error < 2e-2


def test_a_kernels_result_is_written_in_place_as_torchs_is():
    """Otherwise h.mul_(2) after a fused activation or norm raises that h is a view, on a GPU
    alone."""
    with hopper.emulated():
        for lead in ((TOKENS,), (2, 16)):
            x = inputs(BF16, *lead)[0].requires_grad_()
            weight = torch.ones(D, dtype=BF16)
            for run in (
                lambda: activate(x, None, 0)[0],
                lambda: normalize(x, weight, None, NormSpec(1e-5, False, False))[0],
            ):
                (want,) = torch.autograd.grad(run().sum(), x)
                (got,) = torch.autograd.grad(run().mul_(2).sum(), x)
                assert_same_bytes(got, want * 2, "dx")


def test_widths_that_no_kernel_takes_run_by_the_reference():
    """Otherwise a width that is no multiple of 8 fails on a GPU."""
    with hopper.emulated() as operators:
        assert norm.activation(torch.ones(4, 12, dtype=BF16), None, 0)[1] is None
        assert (
            norm.norm(
                torch.ones(4, 16400), torch.ones(16400), None, NormSpec(1e-5, False, False)
            ).amax
            is None
        )
        assert (
            norm.norm(
                torch.ones(4, 16), torch.ones(16, dtype=BF16), None, NormSpec(1e-5, False, False)
            ).amax
            is None
        )
        g = torch.ones(4, 40, dtype=BF16)[:, 4:36]  # rows that begin between multiples of 16 bytes
        assert norm.activation(g, g, 2)[1] is not None
        assert operators.count("activation") == 1
