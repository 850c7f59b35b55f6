# SPDX-License-Identifier: Apache-2.0
"""`fq.convert(fuse=...)`: MLPs and norms of users' classes on fused kernels: the same bits, or
refused by name."""

from __future__ import annotations

import contextlib
import copy
import io
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.laws import assert_same_bytes, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.context import STEP

BF16 = torch.bfloat16
D, HIDDEN = 32, 64


class MLP(nn.Module):
    """As users write SwiGLU."""

    def __init__(self, d: int = D, hidden: int = HIDDEN, dtype: torch.dtype = BF16):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(d, hidden, bias=False, dtype=dtype) for _ in range(2)
        )
        self.down_proj = nn.Linear(hidden, d, bias=False, dtype=dtype)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(
            self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        )


class Gelu(nn.Module):
    """Without a gate, of other names, with biases."""

    def __init__(self):
        super().__init__()
        self.fc, self.proj = nn.Linear(D, HIDDEN, dtype=BF16), nn.Linear(HIDDEN, D, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Packed(nn.Module):
    """As transformers writes Phi 3 and GLM-4: one layer for gate and up."""

    def __init__(self, d: int = D, hidden: int = HIDDEN):
        super().__init__()
        self.gate_up_proj = nn.Linear(d, 2 * hidden, bias=False, dtype=BF16)
        self.down_proj = nn.Linear(hidden, d, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * F.silu(gate))


class UpFirst(Packed):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * F.silu(gate))


class Swapped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * F.silu(self.up_proj(x)))


class Detached(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)).detach() * self.up_proj(x))


class InFloat(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj((F.silu(self.gate_proj(x).float()) * self.up_proj(x)).to(x.dtype))


class Dropped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class Several(MLP):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x * mask)


GELU = fq.MLPPattern("1", "gelu_tanh", gate=None, up="fc", down="proj")
PACKED = fq.MLPPattern("2", gate=None, up="gate_up_proj")
ALL = (fq.MLPPattern("0"), GELU, PACKED)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MLP(), Gelu(), Packed())


def step(net: nn.Module) -> dict[str, Tensor]:
    """Output and gradients of a step."""
    STEP.seed, STEP.step, STEP.micro_batch = 0, 0, 0
    STEP.publish()
    net.zero_grad()
    x = values(2, 16, D, seed=4, dtype=BF16).requires_grad_()
    y = net(x)
    y.backward(values(2, 16, D, seed=5, dtype=BF16))
    return {"y": y.detach(), "dx": x.grad} | {n: p.grad.clone() for n, p in net.named_parameters()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same_bytes(got[name], tensor, name)


@pytest.mark.parametrize("name", ("identity", "fp8_current", "nvfp4"))
def test_fusing_changes_no_bit(name: str):
    """If false, a model that asks for fused kernels trains to other weights; parameters and names
    stay as they were."""
    plain, net = (model() for _ in range(2))
    before = dict(net.named_parameters())
    fq.convert(net, getattr(recipes, name)(), fuse=ALL)
    fq.convert(plain, getattr(recipes, name)())
    assert all(net.get_parameter(n) is p for n, p in before.items()) and list(
        net.state_dict()
    ) == list(before)
    assert_same(step(net), step(plain))
    assert isinstance(net[0], MLP) and isinstance(net[0].up_proj, fq.Linear)
    x = values(4, D, seed=1, dtype=BF16)
    assert_same_bytes(net[0](hidden_states=x), plain[0](x), "by keyword")
    with pytest.raises(TypeError, match="positional arguments but 3 were given"):
        net[0](x, x)


def test_fused_modules_call_the_activations_kernel():
    """If false, fuse= is honoured in name alone."""
    with hopper.emulated() as operators:
        net = fq.convert(model(), recipes.fp8_current(), fuse=ALL)
        kernels = ("activation", "linear_gated", "activation_backward", "amaxes")
        # of the proof, which here looks as if it were on a GPU
        before = [operators.count(k) for k in kernels]
        step(net)
        # gated ones as they are quantized;
        assert [operators.count(k) - n for k, n in zip(kernels, before)] == [1, 2, 3, 5]
        # amaxes, which were compared, of h without a gate, and of the gradients of its up, of gate,
        # of up, and of both in one


@pytest.mark.parametrize("hidden", (24, 20))
def test_widths_that_no_kernel_takes_train_to_the_same_bits(hidden: int):
    """If false, the backward of a fused MLP of another width fails where kernels run, or reads
    amaxes that nobody wrote."""
    outcomes = []
    with hopper.emulated():
        for fuse in (True, False):
            torch.manual_seed(0)
            outcomes.append(
                step(
                    fq.convert(
                        nn.Sequential(MLP(hidden=hidden), Packed(hidden=hidden)),
                        recipes.fp8_current(),
                        fuse=fuse,
                    )
                )
            )
    assert_same(*outcomes)


@pytest.mark.parametrize("kind", (Swapped, Detached, InFloat, Dropped, Several))
def test_another_function_is_refused_by_name(kind: type):
    """If false, fuse= silently replaces a forward that computes something else, or has another
    gradient."""
    net = nn.ModuleDict({"block": kind()}).eval()  # a dropout counts all the same
    with pytest.raises(ValueError, match=rf"^block: {kind.__name__}.forward"):
        fq.convert(net, recipes.mxfp8(), fuse=[fq.MLPPattern("block")])
    # nothing was changed
    assert type(net["block"]) is kind and type(net["block"].up_proj) is nn.Linear
    assert not net["block"].training


def test_patterns_that_cannot_be_honoured_are_refused():
    """If false, a misspelt pattern leaves a model as it was without a word."""
    for pattern, message in (
        (fq.MLPPattern("mlp"), "'mlp' matches no module of Sequential"),
        (fq.MLPPattern("1"), "1.gate_proj is NoneType"),
        (PACKED._replace(modules="0", up="up_proj"), "0: MLP.forward fails on a small"),
        (PACKED._replace(activation="gelu"), r"2: Packed.forward fails on a small"),
        (
            PACKED._replace(activation="sin"),
            "activation must be one of gelu, gelu_tanh, .*, swiglu",
        ),
        (fq.MLPPattern("0", "gelu"), "activation must be one of geglu, geglu_tanh, swiglu, reglu"),
        (fq.MLPPattern("0", "geglu"), "0: MLP.forward gives other bits than down_proj"),
        (GELU._replace(activation="gelu"), "1: Gelu.forward gives other bits than proj"),
    ):
        with pytest.raises(ValueError, match=message):
            fq.convert(model(), recipes.mxfp8(), fuse=pattern)
    with pytest.raises(ValueError, match="both name it"):
        fq.convert(model(), recipes.mxfp8(), fuse=[GELU, GELU])


def test_fused_modules_are_copied_pickled_and_compiled():
    """If false, a fused model cannot be deep-copied for an EMA, saved whole, or compiled."""
    net = fq.convert(model(), recipes.mxfp8(), fuse=ALL)
    want = step(net)
    memory = io.BytesIO()
    torch.save(net, memory)
    memory.seek(0)
    for other in (copy.deepcopy(net), torch.load(memory, weights_only=False)):
        assert type(other[0]) is type(net[0])
        assert_same(step(other), want)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert_same({n.removeprefix("_orig_mod."): t for n, t in step(compiled).items()}, want)


def test_hooks_of_an_activation_are_called():
    """If false, a fused MLP hides its activations from who looks at them."""
    net, seen = fq.convert(nn.Sequential(MLP()), recipes.mxfp8()), []
    x = values(4, D, dtype=BF16)
    want = net(x)
    handle = net[0].act_fn.register_forward_hook(lambda m, args, y: seen.append(y.shape))
    assert_same_bytes(net(x), want, "with a hook")
    assert type(net[0]).__name__ == "FusedMLP" and seen == [(4, HIDDEN)]
    handle.remove()
    net(x)
    assert len(seen) == 1


def test_modules_on_meta_are_proven_too():
    """If false, models that are made before their memory cannot be fused, or their shapes not be
    inferred."""
    with torch.device("meta"):
        net = nn.Sequential(MLP(), Gelu(), Packed())
    assert type(fq.convert(net, recipes.mxfp8(), fuse=ALL)[0]).__name__ == "FusedMLP"
    y = net(torch.ones(4, D, dtype=BF16, device="meta"))
    assert y.is_meta and (y.shape, y.dtype) == ((4, D), BF16)


# Norms #


class Centered(nn.Module):
    """As Gemma writes it: in fp32, gamma = 1 + weight."""

    def __init__(self):
        super().__init__()
        self.scale, self.variance_epsilon = nn.Parameter(torch.zeros(D, dtype=BF16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        return (
            values
            * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)
            * (1.0 + self.scale.float())
        ).type_as(x)


class RoundedTwice(Centered):
    """As Llama writes it: rounded before gamma."""

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        return self.scale * (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )


CENTERED = fq.NormPattern("2", zero_centered_gamma=True, weight="scale", eps="variance_epsilon")
ROUNDED = fq.NormPattern("6", weight="scale", eps="variance_epsilon", rounds_first=True)
NORMS = (fq.NormPattern("0"), CENTERED, fq.NormPattern("4", "LayerNorm"), ROUNDED)


def normed() -> nn.Sequential:
    """Each norm in front of a linear layer."""
    torch.manual_seed(0)
    norms = (
        nn.RMSNorm(D, eps=1e-5, dtype=BF16),
        Centered(),
        nn.LayerNorm(D, dtype=BF16),
        RoundedTwice(),
    )
    for norm in norms:
        for p in norm.parameters():
            nn.init.normal_(p, 1.0)
    return nn.Sequential(
        *(layer for norm in norms for layer in (norm, nn.Linear(D, D, dtype=BF16)))
    )


def test_fused_norms_change_no_bit_and_run_their_kernels():
    """If false, norm + linear trains to other weights, or fuse= is honoured in name alone."""
    plain, net = (fq.convert(normed(), recipes.fp8_current(), fuse=fuse) for fuse in ((), NORMS))
    assert_same(step(net), step(plain))
    assert isinstance(net[0], nn.RMSNorm) and list(net.state_dict()) == list(plain.state_dict())
    assert_same(step(copy.deepcopy(net)), step(plain))
    # what the kernel does not take runs as before
    for other in (values(2, D, dtype=torch.float32), None):
        with torch.autocast("cpu", BF16, enabled=other is None):
            x = values(2, D, dtype=BF16) if other is None else other
            assert_same_bytes(net[0](x), plain[0](x), "norm")
    with hopper.emulated() as operators:
        net = fq.convert(normed(), recipes.fp8_current(), fuse=NORMS)
        before = [operators.count(n) for n in ("norm", "norm_backward")]
        step(net)
        counts = [operators.count(n) - b for n, b in zip(("norm", "norm_backward"), before)]
    assert counts == [4, 4]


def test_norms_of_other_bits_are_refused_by_name():
    """If false, a norm that rounds elsewhere is replaced in silence."""
    cases = (
        (
            RoundedTwice(),
            CENTERED._replace(modules="0", zero_centered_gamma=False),
            "RoundedTwice.forward gives other bits",
        ),
        (
            Centered(),
            ROUNDED._replace(modules="0"),
            "other bits than RMSNorm, rounded first with gamma = scale",
        ),
        (
            RoundedTwice(),
            ROUNDED._replace(modules="0", zero_centered_gamma=True),
            "rounds_first is of an RMSNorm",
        ),
        (
            nn.RMSNorm(D),
            fq.NormPattern("0"),
            r"0 is RMSNorm; .* wants a weight \[dim\] and a number eps",
        ),
        (
            nn.LayerNorm(D),
            fq.NormPattern("0"),
            "LayerNorm.forward gives other bits than RMSNorm with gamma = weight",
        ),
        (
            nn.LayerNorm(D),
            fq.NormPattern("0", "layer"),
            "normalization must be 'RMSNorm' or 'LayerNorm'",
        ),
    )
    for norm, pattern, message in cases:
        with pytest.raises(ValueError, match=message):
            fq.convert(nn.Sequential(norm, nn.Linear(D, D)), recipes.mxfp8(), fuse=pattern)


# What is recognized #


class Titan(nn.Module):
    """torchtitan's feed-forward."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = (
            nn.Linear(D, HIDDEN, False),
            nn.Linear(D, HIDDEN, False),
            nn.Linear(HIDDEN, D, False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Vision(nn.Module):
    """timm's MLP."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = (
            nn.Linear(D, HIDDEN),
            nn.GELU(),
            nn.Dropout(0.0),
            nn.Linear(HIDDEN, D),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Clamped(Titan):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)).clamp(max=7) * self.w3(x))


class LlamaNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(D)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        return self.weight * (
            values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        ).to(x.dtype)


def test_blocks_are_recognized_and_change_no_bit():
    """If false, fq.convert makes another model of what people have, leaves its norms and MLPs to
    slow kernels unsaid, or takes random numbers of torch's, by which a model that is initialized
    later is another one."""
    torch.manual_seed(0)
    parts = [LlamaNorm(), Titan(), nn.LayerNorm(D), Vision(), Clamped(), Packed(), UpFirst()]
    numbers = torch.get_rng_state()
    plain, net = (
        fq.convert(nn.Sequential(*copy.deepcopy(parts)).to(BF16), recipes.mxfp8(), fuse=fuse)
        for fuse in (False, True)
    )
    assert torch.equal(torch.get_rng_state(), numbers)
    assert_same(step(net), step(plain))
    assert [type(m).__name__.startswith("Fused") for m in net] == [
        True,
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    assert not any(type(m).__name__.startswith("Fused") for m in plain)
    notes = "\n".join(fq.plan(net).notes)
    for line in (
        "fused: w2(silu(w1(x)) * w3(x))",
        "fused: fc2(gelu(fc1(x)))",
        "fused: RMSNorm, rounded first",
        "not fused: 4: Clamped",
        "fused: down_proj(silu(g) * u), g and u of gate_up_proj(x)",
        "not fused: 6: UpFirst.forward gives other bits",
    ):
        assert line in notes, notes
    skipped = fq.convert(nn.Sequential(*copy.deepcopy(parts)).to(BF16), recipes.mxfp8(), skip="w2")
    assert type(skipped[1]) is Titan  # its products are not ours alone


LIMIT: float | None = None


def gated(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g if LIMIT is None else g.clamp(max=LIMIT)) * u


class Scaled(nn.Module):
    """An activation as people write them, without a repr of its settings."""

    def __init__(self, beta: float = 1.0):
        super().__init__()
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) if self.beta == 1 else x * torch.sigmoid(self.beta * x)


class Settings(MLP):
    """Each part is what a pattern says, until something is changed."""

    def __init__(
        self, act: nn.Module | None = None, scale: float = 1.0, limit: float | None = None
    ):
        super().__init__(dtype=torch.float32)
        self.act_fn, self.drop, self._scale, self.limit = (
            act or Scaled(),
            nn.Dropout(0.0),
            scale,
            limit,
        )

    def forward(self, x: Tensor) -> Tensor:
        g = self.gate_proj(x)
        if self.limit is not None:
            g = g.clamp(max=self.limit)
        return self.down_proj(self.drop(self.act_fn(g)) * self.up_proj(x) * self._scale)


class Inherits(Settings):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if not hasattr(self, "off") else x


class ByGlobals(Titan):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(gated(self.w1(x), self.w3(x)))


class Helper:
    @staticmethod
    def gated(module: nn.Module, g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g if module.limit is None else g.clamp(max=module.limit)) * u


class ByHelper(Titan):
    limit: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(Helper.gated(self, self.w1(x), self.w3(x)))


class ByName(Titan):
    """What it lacks it reads by name, or as a child that is None."""

    def __init__(self):
        super().__init__()
        self.register_module("last", None)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * getattr(self, "gain", 1)
        return y if self.last is None else self.last(y)


class InheritsNorm(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def of_cls(module: nn.Module) -> type[nn.Module]:
    return getattr(type(module), "fused_from", type(module))


def doubled(forward):
    return lambda *args: 2 * forward(*args)


# (module, what is done to it): in the order of what is changed: children, settings, code
CHANGES = {
    "activation": (Settings, lambda m, patch: setattr(m, "act_fn", nn.ReLU())),
    "class of the activation": (Vision, lambda m, patch: setattr(m.act, "__class__", nn.Sigmoid)),
    "setting of the activation": (Settings, lambda m, patch: setattr(m.act_fn, "beta", 1.7)),
    "forward of the activation": (
        Settings,
        lambda m, patch: setattr(m.act_fn, "forward", torch.tanh),
    ),
    "hook of the activation": (
        Settings,
        lambda m, patch: m.act_fn.register_forward_hook(lambda m, args, y: 2 * y),
    ),
    "hook of a layer": (
        Settings,
        lambda m, patch: m.up_proj.register_forward_pre_hook(lambda m, args: (2 * args[0],)),
    ),
    "class of torch": (
        Vision,
        lambda m, patch: patch(nn.GELU, "forward", lambda self, x: torch.tanh(x)),
    ),
    "dropout": (Settings, lambda m, patch: setattr(m.drop, "p", 0.5)),
    "private": (Settings, lambda m, patch: setattr(m, "_scale", 1.015)),
    "limit": (Settings, lambda m, patch: setattr(m, "limit", 0.1)),
    "attribute that was not there": (Inherits, lambda m, patch: setattr(m, "off", True)),
    "attribute by name": (ByName, lambda m, patch: setattr(m, "gain", 2)),
    "child that was None": (ByName, lambda m, patch: setattr(m, "last", nn.ReLU())),
    "attribute that a helper reads": (ByHelper, lambda m, patch: setattr(m, "limit", 0.1)),
    "forward": (Titan, lambda m, patch: patch(of_cls(m), "forward", doubled(of_cls(m).forward))),
    "forward of the instance": (Titan, lambda m, patch: setattr(m, "forward", doubled(m.forward))),
    "inherited forward": (
        Inherits,
        lambda m, patch: patch(Settings, "forward", doubled(Settings.forward)),
    ),
    "function": (ByGlobals, lambda m, patch: patch(None, "gated", lambda g, u: F.relu(g) * u)),
    "global": (ByGlobals, lambda m, patch: patch(None, "LIMIT", 0.1)),
    "eps": (LlamaNorm, lambda m, patch: setattr(m, "variance_epsilon", 0.1)),
    "forward of a norm": (
        InheritsNorm,
        lambda m, patch: patch(LlamaNorm, "forward", doubled(LlamaNorm.forward)),
    ),
}


@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_a_proof_depended_on_is_looked_up_in_each_forward(what: str, copied: bool):
    """If false, a module that is changed after fq.convert computes what it did before, and the plan
    says so too."""
    kind, change = CHANGES[what]

    @contextlib.contextmanager
    def patched():
        with pytest.MonkeyPatch.context() as patches:
            yield (
                lambda owner, name, value: (
                    patches.setitem(globals(), name, value)
                    if owner is None
                    else patches.setattr(owner, name, value)
                )
            )

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(D, D), kind()).to(BF16)
    net = fq.convert(copy.deepcopy(plain), recipes.identity())
    assert hasattr(type(net[1]), "fused_as")
    x, outputs = values(4, 2, D, seed=1, dtype=BF16), []
    assert_same_bytes(net(x), plain(x), "before")
    net = copy.deepcopy(net) if copied else net
    for model in (plain, net):
        with patched() as patch:
            change(model[1], patch)
            torch.manual_seed(1)
            outputs.append(model(x).detach())
            notes = "\n".join(fq.plan(net).notes) if model is net else ""
    assert_same_bytes(outputs[1], outputs[0], what)
    if what != "hook of a layer":  # which the fused module calls
        assert "has changed since fq.convert" in notes and "  fused: " not in notes, notes


def test_a_changed_module_is_one_function_compiled_and_eager():
    """If false, the compiled model and the eager one give two answers."""
    torch.compiler.reset()
    net = fq.convert(nn.Sequential(Settings()).to(BF16), recipes.identity())
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = values(4, D, seed=1, dtype=BF16)
    outputs = []
    for beta in (1.0, 1.7):
        net[0].act_fn.beta = beta
        outputs.append(net(x))
        assert_same_bytes(compiled(x), outputs[-1], f"beta {beta}")
    assert not torch.equal(*outputs)


def with_forward(forward, **attributes) -> type[nn.Module]:
    return type("Other", (Settings,), {"forward": forward, **attributes})


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return F.silu(x)

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def _with_buffer() -> nn.Module:
    module = with_forward(lambda self, x: Settings.forward(self, x) * self.gain)()
    module.register_buffer("gain", torch.tensor(1.0))
    return module


def _hooked(self, x):
    h = self.act_fn(self.gate_proj(x))
    if h.requires_grad:
        h.register_hook(lambda grad: grad.clamp(-1000, 1000))
    return self.down_proj(h * self.up_proj(x))


def _counting(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return Settings.forward(self, x)


def _in_autocast(self, x):
    with torch.autocast("cuda", BF16):
        return Settings.forward(self, x)


OTHERS = {
    "clamp far out": lambda: Settings(limit=1000.0),
    "scale": lambda: Settings(scale=1.015),
    "activation": lambda: Settings(Scaled(1.001)),
    "parameters of the activation": lambda: Settings(nn.PReLU(init=0.0)),
    "buffer": _with_buffer,
    "gradient hook": with_forward(_hooked),
    "detach of the data": with_forward(
        lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)).data * self.up_proj(x))
    ),
    "own gradient": with_forward(
        lambda self, x: self.down_proj(Silu.apply(self.gate_proj(x)) * self.up_proj(x))
    ),
    "number of tokens": with_forward(
        lambda self, x: Settings.forward(self, x) if x.shape[0] < 1000 else x
    ),
    "values": with_forward(lambda self, x: Settings.forward(self, x) if x.max() < 1e9 else x),
    "dtype of a weight": with_forward(
        lambda self, x: Settings.forward(self, x.to(self.down_proj.weight.dtype))
    ),
    "mutable": with_forward(
        lambda self, x: Settings.forward(self, x) if self.options["on"] else x, options={"on": True}
    ),
    "state": with_forward(_counting),
    "autocast": with_forward(_in_autocast),
    "without gradients": with_forward(torch.no_grad()(Settings.forward)),
    "writes its input": with_forward(lambda self, x: Settings.forward(self, x.mul_(1.5))),
}


@pytest.mark.parametrize("what", OTHERS)
def test_operators_that_no_pattern_has_are_seen(what: str):
    """If false, data decides: a clamp that random numbers do not reach, or a branch that a small
    input does not take, is dropped in silence."""
    torch.manual_seed(0)
    # one that is proven before, of the same class, proves nothing of this one
    net = nn.ModuleDict({"first": Settings(), "linear": nn.Linear(D, D), "block": OTHERS[what]()})
    fq.convert(net, recipes.identity())
    assert hasattr(type(net["first"]), "fused_as") and not hasattr(type(net["block"]), "fused_as")
    assert "not fused: block: " in "\n".join(fq.plan(net).notes)


class GatedNorm(LlamaNorm):
    """As transformers writes it for Mamba 2: a norm alone, or of what a gate scaled."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else (x.float() * F.silu(gate.float())).to(x))


@pytest.mark.parametrize(
    "fuse", [True, [fq.NormPattern("1", eps="variance_epsilon", rounds_first=True)]]
)
def test_calls_with_other_arguments_run_the_forward_of_the_module(fuse):
    """If false, hybrids with Mamba 2 cannot run, or lose the gates of their norms."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(D, D), GatedNorm()).to(BF16)
    net = fq.convert(copy.deepcopy(plain), recipes.identity(), fuse=fuse)
    x, gate = (values(3, D, seed=seed, dtype=BF16) for seed in (1, 2))
    for given, named in (((x,), {}), ((x, gate), {}), ((x,), {"gate": gate})):
        assert_same_bytes(net[1](*given, **named), plain[1](*given, **named), f"{named.keys()}")
    assert (type(net[1]) is GatedNorm) is (fuse is True)
    said = "not fused: 1: GatedNorm.forward takes gate besides its input"
    assert (said in "\n".join(fq.plan(net).notes)) is (fuse is True)


def test_recognized_norms_have_what_torch_gives_them():
    """If false, a gradient penalty or torch.func fails in a converted model where it did not
    before."""
    x = values(3, D, dtype=BF16)
    results = []
    for fuse in (False, True):
        torch.manual_seed(0)
        net = fq.convert(
            nn.Sequential(nn.Linear(D, D), LlamaNorm()).to(BF16), recipes.identity(), fuse=fuse
        )[1]
        assert (type(net) is LlamaNorm) is not fuse
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(at).float().square().sum(), at, create_graph=True)
        slope.square().sum().backward()
        of_function = torch.func.grad(lambda x, net=net: net(x).float().square().sum())(x)
        results.append([slope.detach(), at.grad, net.weight.grad, of_function])
    for got, want in zip(*results):
        # second derivatives round elsewhere
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "olmo2",
    "llama4_text",
    "gpt_oss",
    "deepseek_v3",
    "gpt2",
    "glm",
    "glm4",
    "falcon",
    "vit",
)  # Qwen 2.5 has the classes of Qwen 2
WITH_EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 4,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 64,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 1,
        "first_k_dense_replace": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


def tiny(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    options = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **WITH_EXPERTS.get(family, {}),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0),
    }
    if family in ("falcon", "vit"):
        del options["head_dim"]  # the others' follows from the widths
    config = transformers.CONFIG_MAPPING[family](
        **options, **({"image_size": 8, "patch_size": 2} if family == "vit" else {})
    )
    auto = (
        transformers.AutoModelForImageClassification
        if family == "vit"
        else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation="eager").to(BF16)


Q_K_V, NORMED = (
    "q_proj, k_proj, v_proj read codes of one input",
    "RMSNorm, rounded first with gamma = weight",
)
GATED_BY = "down_proj({}(gate_proj(x)) * up_proj(x))"
OF_HALVES = "down_proj(silu(g) * u), g and u of gate_up_proj(x)"
PLAINLY_NORMED, NORMED_FROM_1 = "RMSNorm with gamma = weight", "RMSNorm with gamma = 1 + weight"
OF_LLAMA, OF_GEMMA = (
    {Q_K_V, NORMED, GATED_BY.format("silu")},
    {Q_K_V, NORMED_FROM_1, GATED_BY.format("gelu_tanh")},
)
TAKEN = {  # of others than Llama
    **dict.fromkeys(("qwen3_moe", "mixtral"), {Q_K_V, NORMED}),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), OF_GEMMA),
    **dict.fromkeys(("glm", "glm4"), {Q_K_V, NORMED, OF_HALVES}),
    "phi3": {NORMED, OF_HALVES},
    **dict.fromkeys(("gpt_neox", "falcon"), {"dense_4h_to_h(gelu(dense_h_to_4h(x)))"}),
    "olmo2": {Q_K_V, PLAINLY_NORMED, GATED_BY.format("silu")},
    "gpt_oss": {Q_K_V, PLAINLY_NORMED},
    "gpt2": set(),
    "deepseek_v3": {
        "q_a_proj, kv_a_proj_with_mqa read codes of one input",
        NORMED,
        GATED_BY.format("silu"),
    },
    "vit": {Q_K_V, "fc2(gelu(fc1(x)))"},
}
ROUTERS = {
    **dict.fromkeys(("qwen3_moe", "mixtral", "deepseek_v3"), "gate"),
    **dict.fromkeys(("llama4_text", "gpt_oss"), "router"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_transformers_trains_to_the_same_bits(family: str):
    """If false, a model of this family is not taken, or is another one when it is."""
    ids, results = torch.arange(16).view(1, 16) % 64, []
    head = "classifier" if family == "vit" else "lm_head"
    given = (
        {"pixel_values": values(1, 3, 8, 8, dtype=BF16), "labels": ids[0, :1]}
        if family == "vit"
        else {"input_ids": ids, "labels": ids}
    )
    for fuse in (False, True):
        net = fq.convert(tiny(family), recipes.fp8_current(), skip=head, fuse=fuse)
        loss = net(**given).loss
        loss.backward()
        results.append(
            {"loss": loss.detach()}
            | {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        )
    assert_same(*results)
    notes = fq.plan(net).notes
    taken = [note.removeprefix("fused: ").split("  [")[0] for note in notes if "used: " in note]
    assert sorted(taken) == sorted(TAKEN.get(family, OF_LLAMA))
    classes = {type(m) for m in net.modules() if hasattr(type(m), "fused_as")}
    assert len(classes) == len(taken), "equal blocks have one class, and so one compiled graph"
    left = {
        n.rpartition(".")[2]
        for n, m in net.named_modules()
        if isinstance(m, nn.Linear) and not isinstance(m, fq.Linear)
    }
    rest = {
        note.removeprefix("in high precision: ").split(".weight")[0]
        for note in notes
        if note.startswith("in high")
    }
    assert rest == {head, *filter(None, [ROUTERS.get(family)])} and head in left <= rest, notes
    if family in ("mixtral", "qwen3_moe"):  # two of four experts multiply a token
        (experts,) = (m for n, m in net.named_modules() if n == "model.layers.0.mlp.experts")
        total = sum(
            m.weight.numel()
            for m in net.modules()
            if isinstance(m, nn.Linear) or "Router" in type(m).__name__
        )
        total += sum(p.numel() for p in experts.parameters())  # of two layers, half
        share = experts.gate_up_proj.numel() / total
        kept = fq.convert(tiny(family), recipes.fp8_current(), skip=("lm_head", "experts"))
        of_experts = f"experts.gate_up_proj of {type(kept.model.layers[0].mlp.experts).__name__}"
        said = f"in high precision: {of_experts}, skip='experts', {share:.1%} of"
        assert said in "\n".join(fq.plan(kept).notes)
        assert "experts" not in "".join(
            note for note in fq.plan(net).notes if "in high precision" in note
        )


def saved_bytes(net: nn.Module) -> int:
    """Of a forward, beside parameters."""
    seen, own = {}, {p.data_ptr() for p in net.parameters()}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in own:
            seen[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = net(values(2, 16, D, seed=4, dtype=BF16).requires_grad_())
    return sum(seen.values()) * bool(y.requires_grad)


@pytest.mark.parametrize(
    "name", laws.every_second(["identity", "fp8_delayed", "fp8_current", "nvfp4"], 1)
)
def test_recomputed_mlps_keep_less_and_train_to_the_same_bits(name: str):
    """If false, recompute="gate_up" keeps what it is to give up, or rounds or records a second
    time."""
    nets = [
        fq.convert(model(), getattr(recipes, name)(), fuse=fuse, recompute=recompute)
        for fuse, recompute in (
            (ALL, None),
            (ALL, "gate_up"),
            ([p._replace(recompute="gate_up") for p in ALL], None),
        )
    ]
    outcomes = [[step(net), step(net)] for net in nets]
    for outcome in outcomes[1:]:
        for got, want in zip(outcome, outcomes[0]):
            assert_same(got, want)
    # Two of gate, up and their product, [32, 64] in bf16, of the first and the third; one of two of
    # the second.
    assert saved_bytes(nets[0]) - saved_bytes(nets[1]) >= 5 * 32 * HIDDEN * 2
    assert "made again in the backward" in str(fq.plan(nets[1])) and "made again" not in str(
        fq.plan(nets[0])
    )
    torch._dynamo.reset()
    for net in nets[:2]:
        fq.begin_step(0, model=net)  # of both, as each is a part that begins a step
        want = step(net[0])
        compiled = torch.compile(net[0], fullgraph=True, backend="aot_eager")
        assert_same(step(compiled), prefixed(want))


def prefixed(outcome: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the names of a compiled module."""
    return {k if k in ("y", "dx") else f"_orig_mod.{k}": v for k, v in outcome.items()}


def test_recomputation_of_what_is_not_fused_is_refused():
    """If false, a user believes that memory is saved."""
    with pytest.raises(ValueError, match="recompute must be None or 'gate_up', got 'all'"):
        fq.convert(model(), recipes.mxfp8(), recompute="all")
    for fuse in (False, True):
        with pytest.raises(
            ValueError, match="recompute='gate_up' is of fused MLPs, and Sequential has none"
        ):
            fq.convert(
                nn.Sequential(nn.Linear(D, D)), recipes.mxfp8(), fuse=fuse, recompute="gate_up"
            )
    with pytest.raises(ValueError, match="recompute must be"):
        fq.convert(model(), recipes.mxfp8(), fuse=fq.MLPPattern("0", recompute="up"))


def test_projections_of_one_input_share_its_codes_while_it_is_that():
    """If false, attention quantizes its input three times, or multiplies codes of before a write,
    or of another module's run."""

    def reads(operators, run) -> int:
        before = len(operators.calls)
        run()
        return sum(c.name == "linear_step" and c.row for c in operators.calls[before:])

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk, self.wv = (nn.Linear(D, D, False, dtype=BF16) for _ in range(3))

        def forward(self, x: Tensor, writes: bool = False) -> Tensor:
            q, k = self.wq(x), self.wk(x)
            return q * k + self.wv(x.mul_(2) if writes else x)

    names = Written.forward.__globals__ | {"__name__": "torchtitan.models"}
    Written.forward = types.FunctionType(Written.forward.__code__, names, "forward", (False,))
    Written.__module__ = "torchtitan.models"
    torch.manual_seed(0)
    plain = nn.Sequential(Written())
    x = values(16, D, seed=4, dtype=BF16)
    with hopper.emulated() as operators:
        shared, apart = (
            fq.convert(copy.deepcopy(plain), recipes.mxfp8(), fuse=fuse)[0]
            for fuse in (True, False)
        )
        for writes, wanted in ((False, 1), (True, 2), (False, 1)):
            assert reads(operators, lambda w=writes: shared(x.clone(), w)) == wanted
            assert_same_bytes(
                shared(x.clone(), writes), apart(x.clone(), writes), f"written {writes}"
            )
        assert reads(operators, lambda: apart(x.clone())) == 3
        assert reads(operators, lambda: (shared.wq(x), shared.wk(x))) == 2, (
            "outside of the module's forward"
        )
        assert all(
            layer.runtime.handed_by_input is None for layer in (shared.wq, shared.wk, shared.wv)
        )


def test_a_vector_is_multiplied_as_one_row():
    """If false, a fused MLP refuses what its modules took."""
    with hopper.emulated():
        net, x = fq.convert(MLP(), "mxfp8"), values(1, D, seed=4, dtype=BF16)
        assert_same_bytes(net(x[0]), net(x)[0], "a vector")
