"""`fq.convert(fuse=...)`: MLPs and norms of users' classes on fused kernels: the same bits, or refused by name."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_quant as fq
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
        self.gate_proj, self.up_proj = (nn.Linear(d, hidden, bias=False, dtype=dtype) for _ in range(2))
        self.down_proj = nn.Linear(hidden, d, bias=False, dtype=dtype)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class Gelu(nn.Module):
    """Without a gate, of other names, with biases."""

    def __init__(self):
        super().__init__()
        self.fc, self.proj = nn.Linear(D, HIDDEN, dtype=BF16), nn.Linear(HIDDEN, D, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


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
BOTH = (fq.MLPPattern("0"), GELU)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MLP(), Gelu())


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
    """If false, a model that asks for fused kernels trains to other weights; parameters and names stay as they were."""
    plain, net = (model() for _ in range(2))
    before = dict(net.named_parameters())
    fq.convert(net, getattr(recipes, name)(), fuse=BOTH)
    fq.convert(plain, getattr(recipes, name)())
    assert all(net.get_parameter(n) is p for n, p in before.items()) and list(net.state_dict()) == list(before)
    assert_same(step(net), step(plain))
    assert isinstance(net[0], MLP) and isinstance(net[0].up_proj, fq.Linear)
    x = values(4, D, seed=1, dtype=BF16)
    assert_same_bytes(net[0](hidden_states=x), plain[0](x), "by keyword")
    with pytest.raises(TypeError, match="of one argument; got 2"):
        net[0](x, x)


def test_fused_modules_call_the_activations_kernel():
    """If false, fuse= is honoured in name alone."""
    with hopper.emulated() as operators:
        net = fq.convert(model(), recipes.fp8_current(), fuse=BOTH)
        kernels = ("activation", "linear_gated", "activation_backward")
        before = [operators.count(k) for k in kernels]  # of the proof, which here looks as if it were on a GPU
        step(net)
        assert [operators.count(k) - n for k, n in zip(kernels, before)] == [1, 1, 2]  # the gated one as it is quantized


@pytest.mark.parametrize("kind", (Swapped, Detached, InFloat, Dropped, Several))
def test_another_function_is_refused_by_name(kind: type):
    """If false, fuse= silently replaces a forward that computes something else, or has another gradient."""
    net = nn.ModuleDict({"block": kind()}).eval()  # a dropout counts all the same
    with pytest.raises(ValueError, match=rf"^block: {kind.__name__}.forward"):
        fq.convert(net, recipes.mxfp8(), fuse=[fq.MLPPattern("block")])
    assert type(net["block"]) is kind and type(net["block"].up_proj) is nn.Linear  # nothing was changed
    assert not net["block"].training


def test_patterns_that_cannot_be_honoured_are_refused():
    """If false, a misspelt pattern leaves a model as it was without a word."""
    for pattern, message in (
        (fq.MLPPattern("mlp"), "'mlp' matches no module of Sequential"),
        (fq.MLPPattern("1"), "1.gate_proj is NoneType"),
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
    net = fq.convert(model(), recipes.mxfp8(), fuse=BOTH)
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


def test_modules_on_meta_are_proven_too():
    """If false, models that are made before their memory cannot be fused."""
    with torch.device("meta"):
        net = nn.Sequential(MLP(), Gelu())
    assert type(fq.convert(net, recipes.mxfp8(), fuse=BOTH)[0]).__name__ == "FusedMLP"


# Norms in front of linear layers #


class Centered(nn.Module):
    """As Gemma writes it: in fp32, gamma = 1 + weight."""

    def __init__(self):
        super().__init__()
        self.scale, self.variance_epsilon = nn.Parameter(torch.zeros(D, dtype=BF16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        return (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.scale.float())).type_as(x)


class RoundedTwice(Centered):
    """As Llama writes it: rounded before gamma."""

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        return self.scale * (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


CENTERED = fq.NormPattern("2", zero_centered_gamma=True, weight="scale", eps="variance_epsilon")
NORMS = (fq.NormPattern("0"), CENTERED, fq.NormPattern("4", "LayerNorm"))


def normed() -> nn.Sequential:
    """Each norm in front of a linear layer."""
    torch.manual_seed(0)
    norms = (nn.RMSNorm(D, eps=1e-5, dtype=BF16), Centered(), nn.LayerNorm(D, dtype=BF16))
    for norm in norms:
        for p in norm.parameters():
            nn.init.normal_(p, 1.0)
    return nn.Sequential(*(layer for norm in norms for layer in (norm, nn.Linear(D, D, dtype=BF16))))


def test_fused_norms_change_no_bit_and_run_their_kernels():
    """If false, norm + linear trains to other weights, or fuse= is honoured in name alone."""
    plain, net = (fq.convert(normed(), recipes.fp8_current(), fuse=fuse) for fuse in ((), NORMS))
    assert_same(step(net), step(plain))
    assert isinstance(net[0], nn.RMSNorm) and list(net.state_dict()) == list(plain.state_dict())
    assert_same(step(copy.deepcopy(net)), step(plain))
    for other in (values(2, D, dtype=torch.float32), None):  # what the kernel does not take runs as before
        with torch.autocast("cpu", BF16, enabled=other is None):
            x = values(2, D, dtype=BF16) if other is None else other
            assert_same_bytes(net[0](x), plain[0](x), "norm")
    with hopper.emulated() as operators:
        net = fq.convert(normed(), recipes.fp8_current(), fuse=NORMS)
        before = [operators.count(n) for n in ("norm", "norm_backward")]
        step(net)
        counts = [operators.count(n) - b for n, b in zip(("norm", "norm_backward"), before)]
    assert counts == [3, 3]


def test_norms_of_other_bits_are_refused_by_name():
    """If false, a norm that rounds elsewhere is replaced in silence."""
    cases = (
        (RoundedTwice(), CENTERED._replace(modules="0", zero_centered_gamma=False), "RoundedTwice.forward gives other bits"),
        (nn.RMSNorm(D), fq.NormPattern("0"), r"0 is RMSNorm; .* wants a weight \[dim\] and a number eps"),
        (nn.LayerNorm(D), fq.NormPattern("0"), "LayerNorm.forward gives other bits than RMSNorm with gamma = weight"),
        (nn.LayerNorm(D), fq.NormPattern("0", "layer"), "normalization must be 'RMSNorm' or 'LayerNorm'"),
    )
    for norm, pattern, message in cases:
        with pytest.raises(ValueError, match=message):
            fq.convert(nn.Sequential(norm, nn.Linear(D, D)), recipes.mxfp8(), fuse=pattern)
