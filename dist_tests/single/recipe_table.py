# SPDX-License-Identifier: Apache-2.0
"""The table of docs/reference/recipes.md: recipe x module x backward mode, and what one cell of it
must do.

A cell runs two steps of a module. Every linear layer in it is held to the definition: decoded
operands, multiplied in fp64 as the mode says, and kept for the backward as the plan says. All else
(norms, activations, splits, residuals) is held bit for bit to plain torch modules, in which each
linear layer is replaced by what it was seen to give.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, recorded_saves, values
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.families import FAMILIES
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction
from fsdp_quant.linear.products import PRODUCTS
from fsdp_quant.models.steps import converted_modules
from fsdp_quant.ops.norm import ACTIVATIONS, GATED
from fsdp_quant.ops.rng import tensor_id
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.scaling import DelayedScaling
from fsdp_quant.storage import Storage

MODES = (None, "high_precision", "dequantized")


class On(NamedTuple):
    """Where a cell runs, and on which sizes: tokens, in and out features, tokens of each expert."""

    device: str
    dtype: torch.dtype
    m: int
    k: int
    n: int
    splits: tuple[int, ...]


CPU = On("cpu", torch.float32, 24, 40, 56, (0, 9, 15, 0))  # no multiples of 16 or 32
GPU = On("cuda", torch.bfloat16, 256, 128, 192, (0, 70, 129, 57))


def any_quantizers(role: fq.Role):
    """A custom recipe: delayed scaling of the forward's input alone, stochastic rounding of mxfp8
    gradients."""
    delayed = Quantizer("fp8_tensor", scaling=DelayedScaling(length=4, margin=1))
    return {
        "input": HybridQuantizer(delayed, "mxfp8"),
        "weight": HybridQuantizer("fp8_row", "mxfp8"),
        "grad_output": Quantizer("mxfp8", rounding="stochastic"),
    }.get(role.tensor_type)


NAMED: dict[str, Callable[..., fq.Recipe]] = {
    name: getattr(recipes, name)
    for name in (
        "identity",
        "fp8_current",
        "fp8_delayed",
        "fp8_row",
        "fp8_block",
        "mxfp8",
        "mxfp6",
        "mxfp4",
        "nvfp4",
    )
} | {"qat(W)": lambda **options: recipes.qat("nvfp4", **options)}
HYBRIDS: dict[str, Callable[..., fq.Recipe]] = {
    f"hybrid({f}, {b})": lambda f=f, b=b, **options: recipes.hybrid(f, b, **options)
    for f in FAMILIES
    for b in FAMILIES
    if f != b
}
CUSTOM: dict[str, Callable[..., fq.Recipe]] = {
    "CustomRecipe": lambda **options: fq.CustomRecipe(any_quantizers, **options)
}
EXACT: dict[str, Callable[..., fq.Recipe]] = {
    "nvfp4(fp8_exact)": lambda **options: recipes.nvfp4(scale_rule="fp8_exact", **options),
    "hybrid(mxfp8, nvfp4)(fp8_exact)": lambda **options: recipes.hybrid(
        "mxfp8", "nvfp4", scale_rule="fp8_exact", **options
    ),
}
SWITCHED: dict[str, Callable[..., fq.Recipe]] = {
    name: lambda make=make, switches=switches, **options: make(**switches, **options)
    for name, make, switches in (
        (
            "mxfp8(e5m2, square)",
            recipes.mxfp8,
            {"grad_element": "e5m2", "square_blocks": True, "stochastic": True},
        ),
        ("fp8_row(e5m2)", recipes.fp8_row, {"grad_element": "e5m2"}),
        (
            "fp8_block(e5m2, vectors)",
            recipes.fp8_block,
            {"grad_element": "e5m2", "square_blocks": False},
        ),
        ("fp8_delayed(stochastic)", recipes.fp8_delayed, {"stochastic": True}),
        (
            "nvfp4(plain)",
            recipes.nvfp4,
            {"rotation": False, "stochastic": False, "square_blocks": False},
        ),
    )
}
RECIPES = NAMED | HYBRIDS | CUSTOM | EXACT | SWITCHED


class Module(NamedTuple):
    """How a module of the table is built, and what it computes of plain torch and of its linear
    layers.

    built:  (recipe, On, **options) -> module.
    plain:  (module, x, linears, On) -> outputs, with torch's own norms, activations and sums.
    call:   (module, x, On) -> outputs.
    lead:   dims of the input in front of the tokens.
    """

    built: Callable
    plain: Callable
    call: Callable = lambda m, x, on: m(x)
    lead: tuple[int, ...] = ()


def _norm(module: fq.Norm) -> Callable[[Tensor], Tensor]:
    spec, dim = module.spec, module.weight.shape
    kind = F.layer_norm if spec.centred else F.rms_norm
    return lambda x: kind(x, dim, module.weight, *([module.bias] if spec.centred else []), spec.eps)


def _activation(name: str, gate: Tensor, up: Tensor) -> Tensor:
    act = {"gelu": F.gelu, "silu": F.silu}[GATED.get(name, name)]
    return act(gate) * up if ACTIVATIONS[name].gated else act(up)


def _layernorm_linear(m: fq.LayerNormLinear, x: Tensor, f: dict, on: On) -> tuple[Tensor, Tensor]:
    n = _norm(m.norm)(x)
    return f["linear"](n), n


def _mlp(m: fq.LayerNormMLP, x: Tensor, f: dict, on: On) -> Tensor | tuple[Tensor, Tensor]:
    n = _norm(m.norm)(x)
    up = f["up_proj"](n)
    y = f["down_proj"](
        _activation(m.activation, f["gate_proj"](n) if m.gate_proj is not None else up, up)
    )
    y = x + y if m.residual else y
    return (y, n) if m.return_layernorm_output else y


def _grouped(m: fq.GroupedLinear, x: Tensor, f: dict, on: On) -> Tensor:
    return torch.cat([linear(part) for linear, part in zip(f.values(), x.split(on.splits))])


MODULES = {
    "Linear": [
        Module(
            lambda r, on, **o: fq.Linear(on.k, on.n, recipe=r, name="m", **o),
            lambda m, x, f, on: f[""](x),
        ),
        Module(
            lambda r, on, **o: fq.Linear(on.k, on.k, bias=False, recipe=r, name="m", **o),
            lambda m, x, f, on: torch.add(x, f[""](x), alpha=0.5),
            lambda m, x, on: m(x, residual=x, scale=0.5),
            (2,),
        ),
    ],
    "LayerNormLinear": [
        Module(
            lambda r, on, **o: fq.LayerNormLinear(
                on.k, on.n, return_layernorm_output=True, recipe=r, name="m", **o
            ),
            _layernorm_linear,
        ),
    ],
    "LayerNormMLP": [
        Module(
            lambda r, on, **o: fq.LayerNormMLP(
                on.k,
                on.n,
                bias=False,
                normalization="RMSNorm",
                residual=True,
                recipe=r,
                name="m",
                **o,
            ),
            _mlp,
        ),
        Module(
            lambda r, on, **o: fq.LayerNormMLP(
                on.k,
                on.n,
                "gelu",
                True,
                "LayerNorm",
                return_layernorm_output=True,
                recipe=r,
                name="m",
                **o,
            ),
            _mlp,
            lead=(2,),
        ),
    ],
    "GroupedLinear": [
        Module(
            lambda r, on, packed=packed, **o: fq.GroupedLinear(
                len(on.splits), on.k, on.n, not packed, packed=packed, recipe=r, name="m", **o
            ),
            _grouped,
            lambda m, x, on: m(x, on.splits),
        )
        for packed in (False, True)
    ],
}


def table() -> str:
    """The table of docs/reference/recipes.md: in each cell the backward modes that a recipe has in
    a module."""
    modes = ", ".join("none" if mode is None else mode for mode in MODES)
    names = [
        *(f"`{name}`" for name in NAMED),
        f"`hybrid(F, B)`, {len(HYBRIDS)} pairs",
        "`CustomRecipe`",
    ]
    lines = [["recipe", *(f"`fq.{m}`" for m in MODULES)], ["---"] * (1 + len(MODULES))]
    lines += [[name, *[modes] * len(MODULES)] for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# What is seen of a linear layer, and what takes its place #


def _watch(layer: fq.Linear, seen: SimpleNamespace) -> None:
    def product(x, *rest):
        x = x.view_as(x)
        seen.x = x.detach()
        x.register_hook(lambda g: setattr(seen, "dx", g))
        y = fq.Linear._product(layer, x, *rest)
        seen.y = y.detach()
        y.register_hook(lambda g: setattr(seen, "dy", g))
        return y

    layer._product = product
    # who looks at a layer sees its input's values
    layer.register_forward_pre_hook(lambda module, args: None)


class _Replay(torch.autograd.Function):
    """What a linear layer was seen to give, of what it was seen to be given."""

    @staticmethod
    def forward(ctx, x, seen):
        assert_same_bytes(x, seen.x, f"input of {seen.name}")
        ctx.seen = seen
        return seen.y.clone()

    @staticmethod
    def backward(ctx, dy):
        assert_same_bytes(dy, ctx.seen.dy, f"gradient of the output of {ctx.seen.name}")
        return ctx.seen.dx, None


# The definition of a linear layer #


class Definition:
    """The three products of a linear layer as the recipe's answers and the mode define them.

    recipe:  without a backward mode.
    encs:    (slot, direction) -> factor of a delayed side, from the amaxes of the steps before.
    """

    def __init__(self, recipe: fq.Recipe, name: str, mode: str | None):
        self.name, self.mode, self.encs = name, mode, {}
        self.hybrids = {
            s: recipe.hybrid(fq.Role("linear", s, name)) for s in ("input", "weight", "grad_output")
        }

    def storages(self, slot: str, x: Tensor) -> dict[Direction, Storage]:
        hybrid = self.hybrids[slot]
        key = torch.tensor(
            [STEP.seed, STEP.step, tensor_id(f"{self.name}.{slot}"), STEP.micro_batch, 0]
        )
        factors = {d: self.encs.get((slot, d), torch.zeros(1)) for d in hybrid.delayed_directions}
        made = {}
        for direction in Direction:
            seen = (
                x.bfloat16() if slot == "weight" and hybrid.side(direction).fmt.is_quantized else x
            )
            made[direction] = hybrid.storages(seen, [direction], key=key, factors=factors)[0][
                direction
            ]
        return made

    def record(self, slot: str, x: Tensor) -> None:
        """The factors of the next step: as many maxima as a history holds are never reached
        here."""
        for d in self.hybrids[slot].delayed_directions:
            side = self.hybrids[slot].side(d)
            amax = x.abs().amax().float().reshape(1) if x.numel() else torch.zeros(1)
            fresh = torch.tensor(side.fmt.element.max) / amax / 2.0**side.scaling.margin
            before = self.encs.get((slot, d))
            if amax > 0:
                self.encs[slot, d] = fresh if before is None else torch.minimum(before, fresh)

    def products(self, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """fp64 operands, NT, of y, dx and dw."""
        made = {
            slot: self.storages(slot, t)
            for slot, t in (("input", x), ("weight", w), ("grad_output", dy))
        }
        decoded = {
            (slot, d): s.decode(torch.float32)
            for slot, sides in made.items()
            for d, s in sides.items()
        }
        for slot, original in (("input", x), ("weight", w), ("grad_output", dy)):
            if self.mode == "high_precision" or (self.mode and slot == "grad_output"):
                decoded[slot, COLUMNWISE] = original
            elif self.mode == "dequantized":
                decoded[slot, COLUMNWISE] = decoded[slot, ROWWISE]
        if self.mode:
            decoded["grad_output", ROWWISE] = dy
        of = {key: t.double() for key, t in decoded.items()}
        return {
            "y": (of["input", ROWWISE], of["weight", ROWWISE]),
            "dx": (of["grad_output", ROWWISE], of["weight", COLUMNWISE].t()),
            "dw": (of["grad_output", COLUMNWISE].t(), of["input", COLUMNWISE].t()),
        }

    def kept(self, slot: str, x: Tensor) -> list[Tensor]:
        """What the backward keeps of the input or the weight: the codes of what it multiplies."""
        hybrid = self.hybrids[slot]
        side = {None: COLUMNWISE, "high_precision": None, "dequantized": ROWWISE}[self.mode]
        if side is None or not hybrid.side(side).fmt.is_quantized:
            return [x]
        codes = self.storages(slot, x)[ROWWISE if hybrid.shares_storage else side]
        return list(codes.buffers().values())

    def quantized(self) -> Counter:
        """What one step quantizes: nothing that no product reads."""
        made = Counter()
        for slot, hybrid in self.hybrids.items():
            sides = (
                []
                if self.mode and slot == "grad_output"
                else [ROWWISE]
                if self.mode
                else hybrid.encodings
            )
            made.update(
                (hybrid.side(d).fmt.name, d.value, "reference")
                for d in sides
                if hybrid.side(d).fmt.is_quantized
            )
        return made


def _check_product(
    what: str, got: Tensor, operands: tuple[Tensor, Tensor], on: On, bias: Tensor | None = None
) -> None:
    """fp32 sums of n terms are off by at most (n + 1) 2^-24 |a| |b|; turning a rotation back adds
    eight operations.

    On a GPU the norm of all errors: anchored products 4e-4 of the whole, operands and results
    rounded to bf16 2^-9 each.
    """
    a, b = operands
    want = a @ b.t() + (0 if bias is None else bias.double())
    error = (got.reshape(want.shape).double() - want).abs()
    if on is not CPU:
        share = error.norm() / want.norm().clamp_min(1e-30)
        assert share <= 4e-4 + 3 * 2.0**-9, f"{what}: error {share:.3g} of the whole"
        return
    bound = (
        (a.shape[1] + 12) * 2.0**-24 * a.norm(dim=1)[:, None] * b.norm(dim=1)
        + 2.0**-22 * want.abs()
        + 1e-30
    )
    assert (error <= bound).all(), f"{what}: error {(error / bound).max():.3g} times its bound"


def take(from_: list[Tensor], wanted: Tensor, what: str) -> None:
    """Remove a tensor of these bytes."""
    for i, t in enumerate(from_):
        if (
            t.shape == wanted.shape
            and t.dtype == wanted.dtype
            and t.numel() == wanted.numel()
            and torch.equal(
                t.detach().contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
            )
        ):
            del from_[i]
            return
    raise AssertionError(
        f"{what} {list(wanted.shape)} {wanted.dtype} is not among the saved "
        f"{[tuple(t.shape) for t in from_]}"
    )


# A cell #


def check_cell(recipe: str, module: str, mode: str | None, on: On = CPU) -> None:
    """On a GPU layers are held to their definition within its sums' roundings, and what is between
    them is not looked at."""
    for kind in MODULES[module]:
        STEP.seed, STEP.step, STEP.counted_by_hand = 0, 0, False
        STEP.publish()
        _check(RECIPES[recipe], kind, mode, on, f"{recipe} {module} {mode}")


def _check(
    make: Callable[..., fq.Recipe], kind: Module, mode: str | None, on: On, what: str
) -> None:
    torch.manual_seed(0)
    model = kind.built(make(backward_override=mode), on, device=on.device, dtype=on.dtype)
    for name, parameter in model.named_parameters():
        if name.startswith("norm."):
            nn.init.normal_(parameter, 1.0)
    layers = converted_modules(model)
    seen = {name: SimpleNamespace(name=name or "it", x=None) for name in layers}
    definitions = {
        name: Definition(make(backward_override=None), layer.runtime.name, mode)
        for name, layer in layers.items()
    }
    for name, layer in layers.items():
        _watch(layer, seen[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2 if any(layer.plan.is_delayed for layer in layers.values()) else 1):
        shape = (*kind.lead, on.m // math.prod(kind.lead), on.k)
        x = values(*shape, seed=2 * step, dtype=on.dtype).to(on.device).requires_grad_()
        counters.reset()
        with recorded_saves() as saved:
            y = kind.call(model, x, on)
        outputs = y if isinstance(y, tuple) else (y,)
        dys = [
            values(*t.shape, seed=2 * step + 1 + 7 * i, dtype=on.dtype).to(on.device)
            for i, t in enumerate(outputs)
        ]
        torch.autograd.backward(outputs, dys)
        quantized, at = Counter(counters.of("quantize")), f"{what}, step {step}"
        for e, (name, layer) in enumerate(layers.items()):
            # else one product served all experts: kernels/test_grouped_linear.py
            if seen[name].x is not None:
                _check_layer(
                    seen[name],
                    definitions[name],
                    _parameters(layer, model, e),
                    saved,
                    on,
                    f"{at}, {seen[name].name}",
                )
        if on is CPU:
            wanted = sum((d.quantized() for d in definitions.values()), Counter())
            assert quantized == wanted, f"{at}: quantized {quantized}, wanted {wanted}"
            _check_between(model, kind, seen, x, outputs, dys, at)
            _check_rest(model, seen, x, saved, at)
        optimizer.step()
        optimizer.zero_grad()


def _parameters(layer: fq.Linear, model: nn.Module, e: int) -> list[Tensor | None]:
    """weight, its gradient, bias, its gradient."""
    owner = model if getattr(model, "packed", False) else layer
    state = owner.state_dict()
    found = [
        state["weight"],
        owner.weight.grad,
        state.get("bias"),
        None if owner.bias is None else owner.bias.grad,
    ]
    return [t if t is None else (t if owner is layer else t[e]).cpu() for t in found]


def _check_layer(
    seen: SimpleNamespace, d: Definition, parameters: list, saved: list[Tensor], on: On, at: str
) -> None:
    weight, dw, bias, db = parameters
    x, dy = (t.reshape(-1, t.shape[-1]).cpu() for t in (seen.x, seen.dy))
    operands = d.products(x, weight, dy)
    _check_product(f"{at}: y", seen.y.cpu(), operands["y"], on, bias)
    _check_product(f"{at}: dx", seen.dx.cpu(), operands["dx"], on)
    _check_product(f"{at}: dw", dw, operands["dw"], on)
    if on is CPU:
        if db is not None:
            assert_same_bytes(db, dy.sum(0), f"{at}: db")
        for buffer in d.kept("input", x):
            take(saved, buffer if buffer is not x else seen.x, at)
        for buffer in d.kept("weight", weight):
            take(saved, buffer, f"{at}: weight")
    for slot, t in (("input", x), ("weight", weight.bfloat16()), ("grad_output", dy)):
        d.record(slot, t)


def _check_between(model, kind: Module, seen: dict, x: Tensor, outputs, dys, what: str) -> None:
    """All but the linear layers is plain torch, bit for bit."""
    given = x.detach().requires_grad_()
    replays = {name: lambda t, of=of: _Replay.apply(t, of) for name, of in seen.items()}
    y = kind.plain(model, given, replays, CPU)
    y = y if isinstance(y, tuple) else (y,)
    norm = {n: p for n, p in model.named_parameters() if n.startswith("norm.")}
    dx, *of_norm = torch.autograd.grad(y, [given, *norm.values()], dys)
    for i, (got, want) in enumerate(zip(outputs, y)):
        assert_same_bytes(got, want, f"{what}: output {i}")
    assert_same_bytes(x.grad, dx, f"{what}: dx")
    for (name, parameter), want in zip(norm.items(), of_norm):
        assert_same_bytes(parameter.grad, want, f"{what}: d {name}")


def _check_rest(model, seen: dict, x: Tensor, saved: list[Tensor], what: str) -> None:
    """Beside what linear layers keep: what a norm and an activation need, once."""
    if hasattr(model, "norm"):
        for t in (x.detach(), *(p.detach() for p in model.norm.parameters())):
            take(saved, t, f"{what}: the norm's")
        rows = x.numel() // x.shape[-1]
        statistics = [t for t in saved if t.dim() == 1 and t.shape[0] in (0, rows)]
        assert len(statistics) == 2, f"{what}: rstd and mean"
        saved = [t for t in saved if not any(t is s for s in statistics)]
    for name in ("gate_proj", "up_proj"):
        if name in seen:
            take(saved, seen[name].y, f"{what}: the activation's")
    assert not saved, f"{what}: kept beside the plan: {[(tuple(t.shape), t.dtype) for t in saved]}"


def check_token_local(recipe: str, accuracy: str, on: On = CPU) -> None:
    """Change the last tokens: outputs and input gradients of those before change if a format's
    scales serve several, and not where `recipes.is_token_local` says so."""
    made, last = RECIPES[recipe](accuracy=accuracy), on.m // 3
    of_calls = []
    for factor in (1.0, 7.3):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(on.k, on.n, device=on.device, dtype=on.dtype))
        fq.convert(layer, made)
        with torch.device(on.device):
            x, dy = (values(on.m, size, seed=size, dtype=on.dtype) for size in (on.k, on.n))
        x[-last:] *= factor
        dy[-last:] *= factor
        fq.begin_step(0)
        with fq.token_offset(0):
            y = layer(x.requires_grad_())
        y.backward(dy)
        of_calls.append([t[:-last] for t in (y.detach(), x.grad)])
    plan = layer[0].plan
    for gradients, (a, b) in enumerate(zip(*of_calls)):
        is_same, is_local = torch.equal(a, b), recipes.is_token_local(made, bool(gradients))
        spans = not plan.operand(*PRODUCTS[gradients].a).keeps_rows_apart
        assert is_same or not is_local, (recipe, accuracy, gradients)
        assert not (is_same and spans), (recipe, accuracy, gradients)
