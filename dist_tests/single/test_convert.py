# SPDX-License-Identifier: Apache-2.0
"""`fq.convert` and `fq.set_recipe`: what becomes quantized, what stays as it was, and what is
refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, values
from dist_tests.single.test_fuse import tiny
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, IDENTITY, ROWWISE
from fsdp_quant.tensor.weight_shard import WeightShard


@pytest.fixture(autouse=True)
def _own_step():
    """Each test counts its steps by training forwards."""
    with kept_step():
        STEP.counted_by_hand = False
        yield


class Block(nn.Module):
    """Names as in a transformer: a gate, two projections and a norm."""

    def __init__(self, d: int = 32):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.gate = nn.Linear(d, 4, bias=False)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.relu(self.up(h))) * self.gate(h).mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, blocks: int = 2, d: int = 32):
        super().__init__()
        self.embed = nn.Embedding(16, d)
        self.layers = nn.ModuleList(Block(d) for _ in range(blocks))
        self.lm_head = nn.Linear(d, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


IDS = torch.arange(12).view(2, 6)


def model(**options) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def loss_of(m: nn.Module) -> Tensor:
    return m(IDS).float().square().mean()


def kinds(m: nn.Module) -> dict[str, type]:
    return {n: type(s) for n, s in m.named_modules() if isinstance(s, nn.Linear)}


def step(m: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = loss_of(m)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# What is converted #


def test_convert_takes_every_linear_in_place():
    """Otherwise some layer silently stays in high precision, or references to modules go stale."""
    m = model()
    before = dict(m.named_modules())
    assert fq.convert(m, recipes.mxfp8()) is m
    assert dict(m.named_modules()) == before
    linears = [n for n, s in before.items() if isinstance(s, nn.Linear)]
    assert len(linears) == 7
    assert kinds(m) == dict.fromkeys(linears, fq.Linear)
    assert {n for n, s in before.items() if "runtime" in s.__dict__} == set(linears)
    assert {type(before[n].weight) for n in linears} == {nn.Parameter}
    counters.reset()
    loss_of(m).backward()
    ran = counters.of("gemm")
    assert sum(n for (_, a, b), n in ran.items() if a == b == "mxfp8") == sum(ran.values()) == 3 * 7


@pytest.mark.parametrize(
    "skip, left",
    [
        (["lm_head"], ["lm_head"]),
        (["gate"], ["layers.0.gate", "layers.1.gate"]),
        (["*.gate", "lm_head"], ["layers.0.gate", "layers.1.gate", "lm_head"]),
        (["layers.1.*"], ["layers.1.gate", "layers.1.up", "layers.1.down"]),
        (["layers.0.up"], ["layers.0.up"]),
        (("*.up", "*.down"), ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]),
        ("lm_head", ["lm_head"]),
    ],
)
def test_skipped_modules_stay_as_they_are(skip, left: list[str]):
    """Otherwise a head or router that must stay in high precision is quantized."""
    m = fq.convert(model(), recipes.mxfp8(), skip=skip)
    assert sorted(n for n, kind in kinds(m).items() if kind is nn.Linear) == sorted(left)
    for name in left:
        assert type(m.get_submodule(name).weight) is nn.Parameter


class Described(nn.Module):
    """What a trainer adds to the layers of its models."""

    def describe(self) -> str:
        return f"{self.tag} {tuple(self.weight.shape)}"


class UserLinear(nn.Linear, Described):
    """As torchtitan's: nn.Linear's forward, and methods, arguments and attributes of its own."""

    def __init__(self, *args, tag: str = "user", **options):
        super().__init__(*args, **options)
        self.tag = tag

    def init_states(self) -> None:
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tag={self.tag}"


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4"])
def test_subclasses_with_the_forward_of_linear_keep_what_they_add(name: str):
    """Otherwise models whose layers are such a class cannot be converted, or lose methods, copies
    and pickles."""
    results, recipe = [], recipes.by_name(name)
    for cls in (nn.Linear, UserLinear):
        torch.manual_seed(0)
        m = fq.convert(nn.Sequential(cls(32, 48), nn.ReLU(), cls(48, 32, bias=False)), recipe)
        file = io.BytesIO()
        torch.save(m, file)
        file.seek(0)
        for made in (m, copy.deepcopy(m), torch.load(file, weights_only=False)):
            assert all(
                isinstance(layer, (fq.Linear, cls)[i])
                for layer in (made[0], made[2])
                for i in range(2)
            )
            x = values(8, 32, dtype=torch.float32)
            y = made(x)
            y.sum().backward()
            results.append([y.detach(), *(p.grad for p in made.parameters())])
    for got in results[1:]:
        for a, b in zip(got, results[0]):
            assert_same_bytes(a, b)
    layer = m[0]
    assert type(layer).__name__ == "UserLinear" and (layer.tag, layer.describe()) == (
        "user",
        "user (48, 32)",
    )
    assert "tag=user" in repr(layer) and name in repr(layer)
    layer.init_states()
    assert (m.state_dict()["0.weight"] == 1).all()
    assert type(m[0]) is type(m[2]), "one class for all of them"
    with pytest.raises(ValueError, match="no nn.Linear to convert"):
        fq.convert(m, recipe)


class NamedLinear(nn.Linear):
    """Keeps the forward of nn.Linear."""


@pytest.mark.parametrize(
    "family", ["torch", "llama", "gpt2", "falcon", "mixtral", "gpt_oss", "llama4_text"]
)
def test_forwards_have_the_names_of_those_they_replace(family: str):
    """Otherwise a program that calls a layer by keywords fails after fq.convert."""
    if family == "torch":
        plain = nn.ModuleList(
            [nn.Linear(32, 32), NamedLinear(32, 32), nn.TransformerEncoderLayer(32, 4, 64)]
        )
    else:
        plain = tiny(family)
    net = fq.convert(copy.deepcopy(plain), "identity")
    modules = dict(plain.named_modules())
    pairs = {(type(modules[n]), type(m)) for n, m in net.named_modules() if n in modules}
    assert any(ours is not theirs for theirs, ours in pairs)
    for theirs, ours in pairs:
        want = inspect.signature(theirs.forward).parameters
        got = list(inspect.signature(ours.forward).parameters.values())
        if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in got[1:]):
            continue  # any call goes on to the class's own forward, which judges it
        assert [p.name for p in got[: len(want)]] == list(want), f"{ours} in place of {theirs}"
        assert all(p.default is not p.empty for p in got[len(want) :])


def test_falcons_layers_are_taken_by_name():
    """Otherwise Falcon has no layer to convert, or a class of its name or a subclass with another
    forward is taken too."""
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon").FalconLinear
    results = []
    for cls in (nn.Linear, falcon):
        torch.manual_seed(0)
        m = fq.convert(nn.Sequential(cls(32, 48), cls(48, 32, bias=False)), recipes.mxfp8())
        file = io.BytesIO()
        torch.save(m, file)
        file.seek(0)
        for made in (m, copy.deepcopy(m), torch.load(file, weights_only=False)):
            assert all(isinstance(layer, fq.Linear) and isinstance(layer, cls) for layer in made)
            y = made(values(8, 32, dtype=torch.float32))
            y.sum().backward()
            results.append([y.detach(), *(p.grad for p in made.parameters())])
    for got in results[1:]:
        for a, b in zip(got, results[0]):
            assert_same_bytes(a, b)
    other = type(
        "FalconLinear", (falcon,), {"forward": lambda self, x: 2 * falcon.forward(self, x)}
    )
    with pytest.raises(ValueError, match="no nn.Linear to convert"):
        fq.convert(nn.Sequential(other(8, 8)), recipes.mxfp8())


READ = {
    "mamba": ("x_proj", "dt_proj", "out_proj"),
    "mamba2": ("out_proj",),
    "jamba": ("dt_proj",),
    "wavlm": ("q_proj", "k_proj", "v_proj", "out_proj"),
}


@pytest.mark.parametrize("family", READ)
def test_layers_that_another_module_reads_stay_and_are_listed(family: str):
    """Otherwise a plan lists products that do not run, and `fully_shard` gathers codes that the
    module cannot multiply."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=16)
    of_family = {
        "mamba": dict(state_size=4),
        "mamba2": dict(state_size=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=4),
        "jamba": dict(num_attention_heads=4, num_key_value_heads=2, attn_layer_period=2)
        | dict(attn_layer_offset=1, num_experts=1, mamba_d_state=4, mamba_dt_rank=4),
        "wavlm": dict(num_attention_heads=4, conv_dim=(8,), conv_stride=(8,), conv_kernel=(8,))
        | dict(num_feat_extract_layers=1, num_conv_pos_embeddings=4)
        | dict(num_conv_pos_embedding_groups=2, mask_time_prob=0.0),
    }[family]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        of_family[name] = 0
    if family == "mamba2":
        del sizes["intermediate_size"]
    config = transformers.CONFIG_MAPPING[family](**sizes | of_family)
    made = transformers.AutoModel.from_config(config).train()
    fq.convert(made, recipes.mxfp8())
    left = {n for n, kind in kinds(made).items() if kind is nn.Linear}
    assert {n.rpartition(".")[2] for n in left} == set(READ[family])
    notes = "\n".join(fq.plan(made).notes)
    assert all(f"{part}.weight of Linear, read by " in notes for part in READ[family]), notes
    counters.reset()
    x = values(2, 64, dtype=torch.float32) if family == "wavlm" else IDS
    made(x).last_hidden_state.float().square().mean().backward()
    assert sum(counters.of("gemm").values()) == len(fq.plan(made).gemms)
    adapted = transformers.AutoModel.from_config(made.config)
    for name in left:  # as PEFT does
        layer = adapted.get_submodule(name)
        adapted.set_submodule(name, nn.ModuleDict({"base_layer": layer}))
    fq.convert(adapted, recipes.mxfp8())
    assert {type(adapted.get_submodule(f"{name}.base_layer")) for name in left} == {nn.Linear}


def hooked(layer: nn.Linear) -> nn.Linear:
    """As accelerate's hooks do, the layer calls the forward that it had."""
    layer.forward = functools.partial(lambda forward, x: forward(x), layer.forward)
    return layer


CHANGED = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "old weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "hooked": hooked,
    "lazy": lambda layer: nn.LazyLinear(32),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", CHANGED)
def test_layers_that_are_not_as_their_class_says_are_left_alone(how: str):
    """Otherwise one such layer makes a model that cannot be converted, or a plan lists products
    that another forward never multiplies."""
    x, made = values(4, 32, dtype=torch.float32), CHANGED[how](nn.Linear(32, 32)).eval()
    want = made(x) if how != "lazy" else None
    m = fq.convert(nn.ModuleList([made, nn.Linear(32, 32)]), recipes.mxfp8())
    assert not isinstance(m[0], fq.Linear) and isinstance(m[1], fq.Linear)
    if want is not None:
        assert_same_bytes(m[0](x).detach(), want.detach(), how)
    assert {row.module for row in fq.plan(m).gemms} == {"1"}
    if how != "lazy":
        assert "in high precision: " in "\n".join(fq.plan(m).notes)
    with pytest.raises(ValueError, match="whose forward and weight are their class's"):
        fq.convert(CHANGED[how](nn.Linear(32, 32)), recipes.mxfp8())


def test_a_class_that_is_given_another_forward_later_runs_it(monkeypatch):
    """If false, a library that patches a class of linear layers is ignored without a word."""

    class Own(nn.Linear):
        pass

    net = fq.convert(nn.Sequential(Own(32, 32), nn.Linear(32, 32)), recipes.mxfp8())
    x = values(4, 32, dtype=torch.float32)
    monkeypatch.setattr(Own, "forward", lambda self, x: 3 * nn.functional.linear(x, self.weight))
    for layer in (net[0], torch.compile(net[0], backend="aot_eager", fullgraph=True)):
        assert_same_bytes(layer(x), 3 * nn.functional.linear(x, net[0].weight), "patched")
    note = "Own: forward has changed since fq.convert, so the module's own forward runs"
    assert note in "\n".join(fq.plan(net).notes)
    other = fq.convert(nn.Sequential(Own(32, 32), nn.Linear(32, 32)), recipes.mxfp8())
    assert type(other[0]) is Own, "patched before"


class Head(nn.Module):
    """A trainer multiplies the weight of its head, as fused losses do."""

    def __init__(self):
        super().__init__()
        self.body, self.lm_head = nn.Linear(64, 64), nn.Linear(64, 96, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor, calls: bool = False) -> Tensor:
        h = self.body(x)
        return self.lm_head(h) if calls else nn.functional.linear(h, self.lm_head.weight)


@pytest.mark.parametrize("recipe", ["identity", "mxfp8", "nvfp4"])
def test_layers_that_did_not_run_are_in_the_receipt(recipe: str, monkeypatch):
    """If false, a head whose weight a trainer multiplies itself counts as one in codes."""
    monkeypatch.setattr(counters, "has_graphs", False)
    net = fq.convert(Head(), recipe)
    fq.reset_receipt()
    assert fq.receipt().idle == ()
    net(values(4, 64, dtype=torch.float32)).sum().backward()
    assert fq.receipt().idle == ("lm_head",)
    assert "did not run: lm_head" in str(fq.receipt())
    net(values(4, 64, dtype=torch.float32), calls=True)
    assert fq.receipt().idle == ()


def test_heads_that_losses_multiply_are_left_out_and_listed():
    """If false, the plan of a model in TRL's or Liger's loss names codes that are never made."""
    names = Head.forward.__globals__ | {"__name__": "trl.trainer.utils"}
    patched = functools.wraps(Head.forward)(types.FunctionType(Head.forward.__code__, names))
    net = Head()
    net.forward = types.MethodType(patched, net)  # as trl patches an instance
    fq.convert(net, recipes.mxfp8())
    assert type(net.lm_head) is nn.Linear and isinstance(net.body, fq.Linear)
    assert "lm_head.weight of Linear, read by the loss of trl" in "\n".join(fq.plan(net).notes)


def test_subclasses_with_another_forward_are_left_alone():
    """Otherwise a class that overrides forward loses its own arithmetic."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    m = nn.ModuleDict({"scaled": Scaled(8, 8), "plain": nn.Linear(8, 8)})
    fq.convert(m, recipes.mxfp8())
    assert type(m["scaled"]) is Scaled
    assert type(m["plain"]) is fq.Linear
    with pytest.raises(ValueError, match="no nn.Linear to convert"):
        fq.convert(nn.Sequential(Scaled(8, 8)), recipes.mxfp8())


def test_a_second_convert_takes_the_rest_and_touches_nothing_else():
    """Otherwise converting a model in two calls wraps weights twice, or resets what the first call
    made."""
    m = fq.convert(model(), recipes.mxfp8(), skip=["lm_head"])
    states = {n: s._weight_state for n, s in m.named_modules() if isinstance(s, fq.Linear)}
    fq.convert(m, recipes.nvfp4())
    assert m.lm_head.recipe == recipes.nvfp4()
    for name, state in states.items():
        assert m.get_submodule(name)._weight_state is state
        assert m.get_submodule(name).recipe == recipes.mxfp8()
    with pytest.raises(ValueError, match="no nn.Linear to convert"):
        fq.convert(m, recipes.nvfp4())


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_tail_keeps_the_last_layers_in_identity(blocks: int):
    """Otherwise the layers that NVFP4 training needs in high precision are quantized, or the wrong
    ones are kept."""
    m = fq.convert(model(blocks=blocks), recipes.nvfp4(tail=0.25), skip=["gate"])
    names = [n for n, kind in kinds(m).items() if kind is fq.Linear]
    assert len(names) == 2 * blocks + 1
    kept = -(-len(names) // 4)
    plain = [n for n in names if m.get_submodule(n).plan.operand("weight", ROWWISE) == IDENTITY]
    assert plain == names[-kept:]
    for name in plain:
        for slot in ("input", "weight", "grad_output"):
            for direction in (ROWWISE, COLUMNWISE):
                assert m.get_submodule(name).plan.operand(slot, direction) == IDENTITY
    for name in names[:-kept]:
        assert m.get_submodule(name).recipe == recipes.nvfp4(tail=0.25)


@pytest.mark.parametrize(
    "layers, percent", [(25, 28), (50, 14), (50, 56), (7, 15), (20, 15), (3, 100), (3, 0)]
)
def test_tail_counts_layers_exactly(layers: int, percent: int):
    """Otherwise binary fractions keep one layer more than the share asked for: 0.28 * 25 is
    7.000000000000001."""
    m = fq.convert(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), recipes.nvfp4(tail=percent / 100)
    )
    kept = sum(layer.plan.operand("weight", ROWWISE) == IDENTITY for layer in m)
    assert kept == -(-layers * percent // 100)


# What is refused #


def untouched(m: nn.Module, before: dict[str, type]) -> None:
    assert kinds(m) == before
    assert not any(isinstance(p, WeightShard) for p in m.parameters())


def wrapped_head(how: str) -> nn.Module:
    net = nn.ModuleDict({"up": nn.Linear(64, 64), "lm_head": nn.Linear(64, 32)})
    if how == "checkpoint":
        net["lm_head"] = checkpoint_wrapper(net["lm_head"])
    elif how == "compile":
        net["lm_head"] = torch.compile(net["lm_head"], backend="eager")
    elif how == "base of an adapter":
        net["lm_head"] = nn.ModuleDict({"base_layer": net["lm_head"]})
    else:
        saved = nn.ModuleDict({"default": net["lm_head"]})
        original = copy.deepcopy(net["lm_head"])
        net["lm_head"] = nn.ModuleDict({"original_module": original, "modules_to_save": saved})
    return net


@pytest.mark.parametrize("how", ["checkpoint", "compile", "base of an adapter", "saved by PEFT"])
def test_patterns_see_through_wrappers(how: str):
    """Otherwise skip=["lm_head"], as every page says, quantizes a head that something wrapped."""
    net = fq.convert(wrapped_head(how), "mxfp8", skip=["lm_head"])
    assert [n for n, m in net.named_modules() if isinstance(m, fq.Linear)] == ["up"]
    recipe = recipes.per_layer("mxfp8", {"lm_head": "fp8_current"})
    net = fq.convert(wrapped_head(how), recipe)
    heads = [m for n, m in net.named_modules() if isinstance(m, fq.Linear) and n != "up"]
    assert heads and all(m.recipe == recipes.fp8_current() for m in heads)


class Router(nn.Sequential):
    """A container of layers."""


@pytest.mark.parametrize(
    "skip, says",
    [
        (["blocks.0"], "skip='blocks.0'"),
        (["router"], "skip='router'"),
        (Router, "skip=Router"),
        (lambda path, module: module.in_features == 64 and "router" in path, "skip=<lambda>"),
    ],
    ids=["by name", "by last component", "by class", "by function"],
)
def test_patterns_cover_what_is_inside_a_module(skip, says: str):
    """If false, a container, a class or a function's choice of layers that is left out is
    quantized, a recipe per block is refused or forgotten by the next step of a schedule, or fq.plan
    does not say what each pattern hit."""
    net = nn.ModuleDict({"up": nn.Linear(64, 64)})
    net["blocks"] = nn.ModuleList(
        nn.ModuleDict({"router": Router(nn.Linear(64, 64), nn.Linear(64, 64))}) for _ in range(1)
    )
    plain = copy.deepcopy(net)
    fq.convert(net, "mxfp8", skip=skip)
    assert [n for n, m in net.named_modules() if isinstance(m, fq.Linear)] == ["up"]
    assert sum(says in note for note in fq.plan(net).notes) == 2
    (named,) = skip if isinstance(skip, list) else [skip]
    later = recipes.per_layer("mxfp8", {named: "nvfp4"})
    for recipe in (later, recipes.schedule("mxfp8", (1, None, later))):
        other = fq.convert(copy.deepcopy(plain), recipe)
        other["blocks"][0]["router"].__class__ = nn.Sequential  # it was asked before
        fq.begin_step(1, model=other)
        names = [m.recipe.name for m in other.modules() if isinstance(m, fq.Linear)]
        assert names == ["mxfp8", "nvfp4", "nvfp4"]
        for part, path in (
            (copy.deepcopy(other), "blocks.0.router.0"),
            (other["blocks"][0], "router.0"),
        ):
            (note,) = (n for n in fq.plan(part).notes if n.startswith("per_layer"))
            assert note == f"per_layer: {says[5:]} is nvfp4  [2 x {path}]"


class Unchosen(nn.Module):
    """Modules of this package, made with a recipe, and a linear layer."""

    def __init__(self, recipe: str | None = None, linear: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = fq.LayerNormMLP(64, 128, recipe=recipe)
        self.head = fq.LayerNormLinear(64, 64, recipe=recipe)
        self.packed = fq.GroupedLinear(2, 64, 64, packed=True, recipe=recipe)
        self.listed = fq.GroupedLinear(2, 64, 64, recipe=recipe)
        self.chosen = fq.Linear(64, 64, recipe="identity")
        self.out = nn.Linear(64, 64) if linear else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.packed(self.head(self.mlp(x)), [16, 16])
        return self.out(self.chosen(self.listed(rows, [10, 22])))


@pytest.mark.parametrize("linear", [True, False])
def test_modules_made_without_a_recipe_are_given_it(linear: bool):
    """If false, a model of this package's own modules trains in high precision after a conversion
    that said nothing, or is refused as converted before."""
    x = torch.linspace(-2, 2, 32 * 64).sin().view(32, 64)
    want = Unchosen("mxfp8", linear)
    if linear:
        fq.convert(want, "mxfp8")
    with pytest.raises(ValueError, match="quantized layers already"):
        fq.convert(want if not linear else copy.deepcopy(want), "nvfp4")
    for recipe in ("mxfp8", recipes.schedule("mxfp8", (5, None, "identity"))):
        net, results = copy.deepcopy(Unchosen(None, linear)), []
        net.chosen = want.chosen = nn.Identity()  # a schedule is of all layers
        fq.convert(net, recipe)
        for m in (net, want):
            y = m(x)
            results.append([y.detach(), *torch.autograd.grad(y.sum(), list(m.parameters()))])
        for got, expected in zip(*results):
            assert_same_bytes(got, expected, str(recipe))
    layers = {"mlp.up_proj": "nvfp4", "packed": "fp8_row", "listed": "fp8_block"}
    net = fq.convert(Unchosen(None, linear), recipes.per_layer("mxfp8", layers), skip=["down_proj"])
    given = {n: m.recipe for n, m in net.named_modules() if isinstance(m, fq.Linear)}
    assert given["mlp.up_proj"] == recipes.nvfp4() and given["head.linear"] == recipes.mxfp8()
    assert given["mlp.down_proj"] == given["chosen"] == recipes.identity()
    assert [m.recipe for m in net.packed.layers] == [recipes.fp8_row()] * 2
    assert [m.recipe for m in net.listed.layers] == [recipes.fp8_block()] * 2


@pytest.mark.parametrize("pattern", ["lm_heads", nn.Conv2d], ids=str)
def test_a_pattern_that_matches_nothing_is_one_error(pattern):
    """Otherwise a misspelled skip quantizes the layer that it was to protect, and each argument
    tells it otherwise."""
    m, shown = model(), getattr(pattern, "__name__", repr(pattern))
    says = f"{shown} matches no layer; the model has layers.0.gate, .* and 2 more"
    with pytest.raises(ValueError, match="skip: " + says):
        fq.convert(m, "mxfp8", skip=["gate", pattern])
    with pytest.raises(ValueError, match="per_layer: " + says):
        fq.convert(m, recipes.per_layer("mxfp8", {pattern: "nvfp4"}))
    assert type(m.layers[0].gate) is nn.Linear
    none = {lambda path, module: False: "nvfp4"}  # chooses none, as it may
    fq.convert(m, recipes.per_layer("mxfp8", none), skip=["layers.0", *none])
    assert not any("per_layer" in note for note in fq.plan(m).notes)
    with pytest.raises(ValueError, match=f"layers: {shown} matches no layer; the model has "):
        fq.inspect(m, layers=pattern)


def test_a_model_without_linear_layers_is_refused():
    """Otherwise a run believes it is quantized."""
    with pytest.raises(ValueError, match="Sequential has no nn.Linear to convert"):
        fq.convert(nn.Sequential(nn.LayerNorm(4)), recipes.mxfp8())
    with pytest.raises(ValueError, match=r"no nn.Linear to convert \(1 skipped, "):
        fq.convert(nn.Sequential(nn.Linear(4, 4)), recipes.mxfp8(), skip=["0"])
    with pytest.raises(ValueError, match="set_recipe found no fq.Linear"):
        fq.set_recipe(model(), recipes.mxfp8())


def test_a_layer_tied_to_an_embedding_stays_and_is_listed():
    """Otherwise a lookup reads a weight that is gathered as codes, or models with tied embeddings
    cannot be converted."""
    m = model()
    m.lm_head.weight = m.embed.weight
    assert fq.convert(m, recipes.mxfp8()) is m
    assert type(m.lm_head) is nn.Linear and m.lm_head.weight is m.embed.weight
    assert isinstance(m.layers[0].up, fq.Linear)
    assert "in high precision: lm_head.weight of Linear, tied to an embedding, " in "\n".join(
        fq.plan(m).notes
    )
    loss_of(m).backward()


def test_a_weight_shared_with_another_module_is_refused_naming_both():
    """Otherwise that module reads a weight that is gathered as codes."""
    m = model()
    m.other = nn.EmbeddingBag.from_pretrained(m.lm_head.weight.detach())
    m.other.weight = m.lm_head.weight
    before = kinds(m)
    with pytest.raises(
        ValueError,
        match=r"lm_head.weight is shared with other.weight \(EmbeddingBag\).*skip=\['lm_head'\]",
    ):
        fq.convert(m, recipes.mxfp8())
    untouched(m, before)


def test_a_weight_shared_with_a_skipped_linear_is_refused():
    """Otherwise one of two tied layers multiplies codes and the other does not know."""
    m = model()
    m.layers[1].up.weight = m.layers[0].up.weight
    before = kinds(m)
    with pytest.raises(ValueError, match="layers.1.up.weight is shared with layers.0.up.weight"):
        fq.convert(m, recipes.mxfp8(), skip=["layers.0.up"])
    untouched(m, before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_weights_of_other_dtypes_are_refused(dtype: torch.dtype):
    """Otherwise another library's packed integers are read as a master weight."""
    m = model()
    m.lm_head.weight = nn.Parameter(torch.zeros(16, 32).to(dtype), requires_grad=False)
    before = kinds(m)
    with pytest.raises(
        ValueError, match=f"lm_head.weight is {dtype}; fq.convert takes fp32, bf16 and fp16"
    ):
        fq.convert(m, recipes.mxfp8())
    untouched(m, before)


# What stays #


def test_an_optimizer_built_before_convert_trains_the_model():
    """Otherwise the optimizer steps parameters that the model no longer has: losses stay flat."""
    m = model()
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    parameters = dict(m.named_parameters())
    step(m, optimizer)  # moments of one step exist
    fq.convert(m, recipes.mxfp8())
    for name, parameter in m.named_parameters():
        assert parameter is parameters[name]
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in m.parameters()
    }
    after = model()
    other = torch.optim.AdamW(after.parameters(), lr=1e-2)
    step(after, other)
    fq.convert(after, recipes.mxfp8())
    rebuilt = torch.optim.AdamW(after.parameters(), lr=1e-2)
    rebuilt.load_state_dict(other.state_dict())
    losses = [(step(m, optimizer), step(after, rebuilt)) for _ in range(5)]
    assert [a for a, _ in losses] == [b for _, b in losses]
    assert losses[-1][0] < losses[0][0]


def test_a_parameter_keeps_its_gradient_attributes_and_hooks():
    """Otherwise converting between a backward and a step loses the gradient, and the tags that
    trainers put on parameters (weight decay, sharding) or their hooks (fused optimizers) are gone
    without a word."""
    m = model()
    calls = []
    m.lm_head.weight.no_weight_decay = True
    m.lm_head.weight.register_hook(lambda g: calls.append("hook"))
    m.lm_head.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    loss_of(m).backward()
    gradient, calls[:] = m.lm_head.weight.grad.clone(), []
    fq.convert(m, recipes.mxfp8())
    assert m.lm_head.weight.no_weight_decay
    assert_same_bytes(m.lm_head.weight.grad, gradient, "gradient")
    loss_of(m).backward()
    assert sorted(calls) == ["accumulated", "hook"]


def test_frozen_parameters_stay_frozen():
    """Otherwise LoRA's base model is trained."""
    m = model().requires_grad_(False)
    m.lm_head.requires_grad_(True)
    fq.convert(m, recipes.mxfp8())
    assert [n for n, p in m.named_parameters() if p.requires_grad] == ["lm_head.weight"]
    loss_of(m).backward()
    assert [n for n, p in m.named_parameters() if p.grad is not None] == ["lm_head.weight"]


# Checkpoints #


def test_state_dict_is_that_of_the_plain_model():
    """Otherwise checkpoints of a converted model need this library to be read."""
    plain, m = model(), fq.convert(model(), recipes.fp8_delayed())
    loss_of(m).backward()
    torch.optim.SGD(m.parameters(), lr=0.0).step()
    want, got = plain.state_dict(), m.state_dict()
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert type(got[name]) is Tensor
        assert not got[name].requires_grad
        assert_same_bytes(got[name], tensor, name)
    assert got._metadata == want._metadata
    kept = m.state_dict(keep_vars=True)
    assert {n: (type(t), t.requires_grad) for n, t in kept.items()} == {
        n: (type(t), t.requires_grad) for n, t in plain.state_dict(keep_vars=True).items()
    }


def test_state_dict_shares_memory_with_the_weights():
    """Otherwise saving doubles the memory of the weights."""
    m = fq.convert(model(), recipes.mxfp8())
    got = m.state_dict()
    assert got["lm_head.weight"].data_ptr() == m.lm_head.weight.data_ptr()


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_saved_state_dict_loads_strictly_into_both_kinds_of_model(weights_only: bool):
    """Otherwise a quantized run cannot continue a plain one, or be served by plain code."""
    source = fq.convert(model(), recipes.mxfp8())
    with torch.no_grad():
        for p in source.parameters():
            p.add_(0.125)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert {type(t) for t in loaded.values()} == {Tensor}
    for target in (model(), fq.convert(model(), recipes.nvfp4())):
        loss_of(target)
        result = target.load_state_dict(loaded, strict=True)
        assert not result.missing_keys
        assert not result.unexpected_keys
        for name, tensor in target.state_dict().items():
            assert_same_bytes(tensor, source.state_dict()[name], name)
        assert loss_of(target).isfinite()


@pytest.mark.parametrize("assign", [False, True])
def test_bf16_checkpoints_load_strictly(assign: bool):
    """Otherwise published weights do not load into fp32 masters; with assign=True the dtype is the
    checkpoint's."""
    checkpoint = {n: t.bfloat16() for n, t in model().state_dict().items()}
    torch.manual_seed(1)
    m = fq.convert(Model(), recipes.mxfp8())
    loss_of(m)
    m.load_state_dict(checkpoint, strict=True, assign=assign)
    for name, parameter in m.named_parameters():
        assert parameter.dtype is (torch.bfloat16 if assign else torch.float32)
        assert_same_bytes(m.state_dict()[name].float(), checkpoint[name].float(), name)
    loaded_first = model()
    loaded_first.load_state_dict(checkpoint, assign=assign)
    assert_same_bytes(m(IDS), fq.convert(loaded_first, recipes.mxfp8())(IDS), "output")
    loss_of(m).backward()
    assert m.lm_head.weight.grad.dtype is m.lm_head.weight.dtype


def test_a_whole_model_saves_and_loads():
    """Otherwise `torch.save(model)` loses the wrapper, the recipe or the tie between parameter and
    module."""
    m = fq.convert(model(), recipes.nvfp4(tail=0.25))
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert {n: s.recipe for n, s in loaded.named_modules() if isinstance(s, fq.Linear)} == {
        n: s.recipe for n, s in m.named_modules() if isinstance(s, fq.Linear)
    }
    fq.begin_step(0)
    a = (loss_of(m).backward(), {n: p.grad for n, p in m.named_parameters()})[1]
    b = (loss_of(loaded).backward(), {n: p.grad for n, p in loaded.named_parameters()})[1]
    for name, gradient in a.items():
        assert_same_bytes(b[name], gradient, name)
    torch.optim.SGD(loaded.parameters(), lr=0.5).step()
    assert not torch.equal(loaded.state_dict()["lm_head.weight"], m.state_dict()["lm_head.weight"])
    changed = loaded(IDS)
    fresh = fq.convert(model(), recipes.nvfp4(tail=0.25))
    fresh.load_state_dict(loaded.state_dict())
    assert_same_bytes(changed, fresh(IDS), "output after a step")


def test_a_deep_copy_trains_on_its_own():
    """Otherwise a copy shares the master, the codes or the histories of the original."""
    for recipe in (recipes.mxfp8(), recipes.fp8_delayed(length=4), recipes.identity()):
        m = fq.convert(model(), recipe)
        step(m, torch.optim.SGD(m.parameters(), lr=0.1))
        copied = copy.deepcopy(m)
        kept, output = {n: t.clone() for n, t in m.state_dict().items()}, m(IDS)
        assert_same_bytes(copied(IDS), output, "copied output")
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.5)
        before = {k: h["amaxes"].clone() for k, h in fq.state_dict(m)["histories"].items()}
        for _ in range(2):
            step(copied, optimizer)
        assert not torch.equal(copied(IDS), output)
        for name, tensor in m.state_dict().items():
            assert_same_bytes(tensor, kept[name], name)
        for key, amaxes in before.items():
            assert_same_bytes(
                fq.state_dict(m)["histories"][key]["amaxes"], amaxes, f"history of {key}"
            )
        with torch.no_grad():
            assert_same_bytes(m.eval()(IDS), output, "original output")


# Moves and casts #


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_cast_after_convert_equals_one_cast_before(dtype: torch.dtype):
    """Otherwise `.to(dtype)` leaves codes of the old weight, or makes another kind of parameter."""
    m = fq.convert(model(), recipes.mxfp8())
    loss_of(m).backward()
    m.zero_grad()
    m.to(dtype)
    want = fq.convert(model().to(dtype), recipes.mxfp8())
    assert type(m.lm_head.weight) is nn.Parameter
    assert_same_bytes(m(IDS), want(IDS), "output")
    loss_of(m).backward()
    loss_of(want).backward()
    for (name, a), (_, b) in zip(m.named_parameters(), want.named_parameters()):
        assert a.dtype is dtype
        assert_same_bytes(a.grad, b.grad, name)


def on_meta(kind: str, recipe: str) -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    """A module, and a call of it with tokens [.., 64]."""
    options = {"device": "meta", "dtype": torch.bfloat16}
    if kind == "experts":
        experts = fq.GroupedLinear(2, 64, 64, packed=True, recipe=recipe, **options)
        return experts, lambda m, x: m(x, torch.empty(2, dtype=torch.int32, device=x.device))
    if kind == "mlp":
        return fq.LayerNormMLP(64, 64, recipe=recipe, **options), lambda m, x: m(x)
    plain = nn.Linear(64, 64, **options)
    if kind == "attention":
        plain = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True, **options)
    with fq.quantized_model_init(recipe) if kind == "quantized" else contextlib.nullcontext():
        return fq.convert(nn.Sequential(plain), recipe), lambda m, x: m(x)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("linear", "fp8_delayed"),
        ("quantized", "fp8_block"),
        ("experts", "mxfp8"),
        ("mlp", "fp8_current"),
        ("attention", "identity"),
    ],
)
def test_shapes_are_inferred_without_values(kind: str, recipe: str):
    """Otherwise a count of operations, or an estimate of memory, fails on a converted model, or
    leaves it unable to train once it has values."""
    model, call = on_meta(kind, recipe)
    for training, grad, fake in ((True, True, False), (False, False, False), (True, True, True)):
        mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
        with mode, torch.set_grad_enabled(grad):
            x = torch.ones(2, 8, 64, dtype=torch.bfloat16, device="meta").requires_grad_()
            y = call(model.train(training), x)
            assert y.is_meta and (y.shape, y.dtype) == (x.shape, x.dtype)
            if not grad:
                continue
            gradients = torch.autograd.grad(y.sum(), [x, *model.parameters()])
            for p, gradient in zip([x, *model.parameters()], gradients):
                assert gradient.is_meta and gradient.shape == p.shape
    with FlopCounterMode(display=False) as flops:
        call(model, torch.ones(2, 8, 64, dtype=torch.bfloat16, device="meta"))
    if kind in ("linear", "quantized", "experts"):
        assert flops.get_total_flops() == 2 * 16 * 64 * 64
    outputs = []
    for net in (model, on_meta(kind, recipe)[0]):
        net.to_empty(device="cpu")
        if kind == "experts":
            continue
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        outputs.append(call(net.eval(), torch.ones(2, 8, 64, dtype=torch.bfloat16)).detach())
    for y in outputs:
        assert_same_bytes(y, outputs[0])


@pytest.mark.parametrize(
    "recipe", [recipes.nvfp4(), recipes.fp8_delayed()], ids=["nvfp4", "fp8_delayed"]
)
def test_a_model_made_on_the_meta_device_equals_one_made_on_the_cpu(recipe: fq.Recipe):
    """Otherwise deferred initialization, the only way to build a large model, gives another model
    or none."""
    want = fq.convert(model(), recipe)
    for inside in (True, False):
        with torch.device("meta"):
            m = Model()
            if inside:
                fq.convert(m, recipe)
        if not inside:
            fq.convert(m, recipe)
        assert {p.device.type for p in m.parameters()} == {"meta"}
        m.to_empty(device="cpu")
        torch.manual_seed(0)
        for module in m.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert type(m.lm_head.weight) is nn.Parameter
        for name, tensor in want.state_dict().items():
            assert_same_bytes(m.state_dict()[name], tensor, name)
        fq.begin_step(0)
        gradients = []
        for each in (m, want):
            each.zero_grad()
            loss_of(each).backward()
            gradients.append({n: p.grad for n, p in each.named_parameters()})
        for name, gradient in gradients[1].items():
            assert_same_bytes(gradients[0][name], gradient, name)


# Another recipe later #


@pytest.mark.parametrize(
    "first, then",
    [
        (recipes.mxfp8(), recipes.nvfp4()),
        (recipes.nvfp4(), recipes.identity()),
        (recipes.identity(), recipes.mxfp8()),
        (recipes.mxfp8(), recipes.mxfp8(scale_rounding="floor")),
        (recipes.fp8_current(), recipes.fp8_delayed(length=4)),
        (recipes.mxfp8(), recipes.mxfp8(compute_dtype=None)),
        (recipes.nvfp4(), recipes.nvfp4(tail=0.5)),
        (recipes.mxfp8(), recipes.mxfp8(backward_override="high_precision")),
    ],
    ids=lambda r: repr(r).replace(" ", ""),
)
def test_set_recipe_equals_a_fresh_model_of_that_recipe(first, then):
    """Otherwise codes, statistics, histories or plans of the old recipe outlive the change."""
    m = fq.convert(model(), first)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(2):
        step(m, optimizer)
    fq.set_recipe(m, then)
    fresh = fq.convert(model(), then)
    fresh.load_state_dict(m.state_dict())
    other = torch.optim.SGD(fresh.parameters(), lr=0.1)
    for i in range(3):
        results = []
        for each, its in ((m, optimizer), (fresh, other)):
            fq.begin_step(10 + i)
            results.append(step(each, its))
        assert results[0] == results[1], i
    for name, tensor in fresh.state_dict().items():
        assert_same_bytes(m.state_dict()[name], tensor, name)


# Amax histories in another recipe #

D4 = recipes.fp8_delayed(length=4)
D4_QUANTIZER = fq.Quantizer("fp8_tensor", scaling=fq.numerics.DelayedScaling(4))


def delayed_rowwise(role):
    is_gradient = role.tensor_type == "grad_output"
    return "mxfp8" if is_gradient else fq.HybridQuantizer(D4_QUANTIZER, "mxfp8")


def delayed_columnwise(role):
    is_gradient = role.tensor_type == "grad_output"
    return D4_QUANTIZER if is_gradient else fq.HybridQuantizer("mxfp8", D4_QUANTIZER)


def delayed_everywhere(role):
    return D4_QUANTIZER


ROWS, EVERYWHERE = fq.CustomRecipe(delayed_rowwise), fq.CustomRecipe(delayed_everywhere)
CHANGES = {  # first recipe, recipe from step 3 on
    "override": (D4, recipes.fp8_delayed(length=4, backward_override="dequantized")),
    "shorter": (recipes.fp8_delayed(length=8), recipes.fp8_delayed(length=2)),
    "longer": (D4, recipes.fp8_delayed(length=8)),
    "another scale": (D4, recipes.fp8_delayed(length=4, margin=1, grad_element="e4m3")),
    "newest": (D4, recipes.fp8_delayed(length=4, use="newest")),
    "max": (recipes.fp8_delayed(length=8, use="newest"), recipes.fp8_delayed(length=3)),
    "another columnwise": (EVERYWHERE, ROWS),
    "another rowwise": (EVERYWHERE, fq.CustomRecipe(delayed_columnwise)),
    "no longer shared": (ROWS, EVERYWHERE),
}


def _of_kind(kind: str, recipe: fq.Recipe) -> nn.Module:
    """A layer whose amaxes no recipe changes: its weights do not train."""
    torch.manual_seed(0)
    if kind == "packed":
        return fq.GroupedLinear(2, 32, 16, packed=True, recipe=recipe)
    context = fq.quantized_model_init(recipe) if kind == "quantized" else contextlib.nullcontext()
    with context:
        return fq.convert(nn.Sequential(nn.Linear(32, 16)), recipe)


def _trained(kind: str, recipe, changes: dict, autocast=contextlib.nullcontext) -> list[dict]:
    """What each of six steps computes, and its histories. changes: step -> recipe from then on."""
    STEP.step, STEP.counted_by_hand = 0, False
    STEP.publish()
    m, seen = _of_kind(kind, recipe), []
    optimizer = fq.optim.FusedAdam(m.parameters(), lr=0.0)
    for i, scale in enumerate((4.0, 16.0, 0.5, 2.0, 8.0, 1.0)):
        if i in changes:
            fq.set_recipe(m, changes[i])
        fq.begin_step(i)
        x = (values(8, 32, dtype=torch.float32, seed=i) * scale).requires_grad_()
        with autocast():
            y = m(x, [3, 5]) if isinstance(m, fq.GroupedLinear) else m(x)
        y.backward(values(8, 16, dtype=torch.float32, seed=i + 9) / scale)
        seen.append({"y": y.detach(), "dx": x.grad})
        seen[-1] |= {f"gradient of {n}": p.grad.clone() for n, p in m.named_parameters()}
        histories = fq.state_dict(m)["histories"].items()
        seen[-1] |= {f"{n} {k}": t for n, h in histories for k, t in h.items()}
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("kind", ["layer", "packed", "quantized", "schedule"])
def test_set_recipe_continues_the_histories_of_what_did_not_change(kind: str):
    """If false, a switch of an override, of a length or of another tensor's format costs the scales
    of the whole run, and the steps after it are not those of a run that had the recipe from its
    start."""
    for name in CHANGES if kind == "layer" else ("override", "shorter", "another rowwise"):
        first, then = CHANGES[name]
        by_step = kind == "schedule"
        start = recipes.schedule(first, (3, None, then)) if by_step else first
        got, want = _trained(kind, start, {} if by_step else {3: then}), _trained(kind, then, {})
        sides = [n.rpartition(".")[0] for n in got[2] if n.endswith("amaxes")]  # up to the switch
        histories = [n for n in want[5] if n.endswith(("amaxes", "enc"))]
        had = [n for n in histories if n.rpartition(".")[0] in sides]
        compared = ["y", *had] if had != histories else want[5]
        assert had and (had == histories or name == "no longer shared")
        for i in (3, 4, 5):
            for what in compared:
                assert_same_bytes(got[i][what], want[i][what], f"{kind}, {name}, step {i}: {what}")


def test_a_longer_history_starts_with_all_amaxes_that_there_are():
    """If false, a longer history forgets what the shorter one knew, or scales by less than it."""
    m = fq.convert(nn.Sequential(nn.Linear(32, 16)), recipes.fp8_delayed(length=2))
    for i, scale in enumerate((64.0, 32.0, 2.0)):
        fq.begin_step(i)
        m(torch.full((1, 32), scale)).sum().backward()
    before = fq.state_dict(m)["histories"]["0.input.rowwise"]
    fq.set_recipe(m, recipes.fp8_delayed(length=4, margin=1))
    after = fq.state_dict(m)["histories"]["0.input.rowwise"]
    assert before["amaxes"].tolist() == [2, 32] and after["amaxes"].tolist() == [2, 32, 0, 0]
    assert before["enc"].item() == 2 * after["enc"].item() == 448 / 64


def test_set_recipe_leaves_the_histories_of_contexts():
    """If false, delayed scaling in `fq.autocast` begins afresh wherever the recipes of the modules
    change."""
    inside = functools.partial(fq.autocast, D4)
    want = _trained("layer", recipes.mxfp8(), {}, inside)
    got = _trained("layer", recipes.mxfp8(), {3: recipes.nvfp4(), 4: D4}, inside)
    for i, step_of_both in enumerate(zip(got, want)):
        for what in ("y", "dx"):
            assert_same_bytes(*(seen[what] for seen in step_of_both), f"step {i}: {what}")


def test_set_recipe_of_one_layer_leaves_a_history_that_another_shares():
    """If false, gate loses its amaxes of the input, or records in a history that nothing rolls, as
    up stores the history for both."""
    m = fq.LayerNormMLP(32, 48, recipe=D4, activation="swiglu")
    for i in range(3):
        fq.begin_step(i)
        m(values(4, 32, dtype=torch.float32, seed=i)).sum().backward()
    want = fq.state_dict(m.gate_proj)["histories"]
    fq.set_recipe(m.up_proj, recipes.mxfp8())
    got = fq.state_dict(m.gate_proj)["histories"]
    assert any(h["enc"] > 0 for n, h in want.items() if "input" in n) and got.keys() == want.keys()
    for name, history in want.items():
        assert_same_bytes(got[name]["amaxes"], history["amaxes"], name)


def test_set_recipe_back_and_forth_starts_afresh():
    """Otherwise scales of a stretch of training long past encode the step after a return to delayed
    scaling."""
    m = fq.convert(model(), recipes.fp8_delayed(length=4))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    step(m, optimizer)
    step(m, optimizer)
    assert all(h["enc"] > 0 for h in fq.state_dict(m)["histories"].values())
    fq.set_recipe(m, recipes.mxfp8())
    step(m, optimizer)
    fq.set_recipe(m, recipes.fp8_delayed(length=4))
    assert all(h["enc"] == 0 for h in fq.state_dict(m)["histories"].values())
    fresh = fq.convert(model(), recipes.fp8_delayed(length=4))
    assert_same_bytes(m(IDS), fresh(IDS), "output")


def test_set_recipe_that_cannot_be_planned_changes_nothing():
    """Otherwise half of a model trains in the new recipe and half in the old."""
    m = fq.convert(model(), recipes.mxfp8())
    want = m(IDS)
    with pytest.raises(ValueError, match="require_native"):
        fq.set_recipe(m, recipes.nvfp4(require_native=True))
    assert {s.recipe for s in m.modules() if isinstance(s, fq.Linear)} == {recipes.mxfp8()}
    assert_same_bytes(m(IDS), want, "output")


def test_set_recipe_counts_the_tail_over_modules_with_equal_names():
    """Otherwise parts that were converted on their own, with equal local names, take each other's
    recipe."""
    parts = [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2)]
    for part in parts:
        fq.convert(part, recipes.mxfp8())
    whole = nn.Sequential(*parts)
    fq.set_recipe(whole, recipes.nvfp4(tail=0.25))
    got = [layer.plan.operand("weight", ROWWISE) == IDENTITY for part in whole for layer in part]
    assert got == [False, False, False, True]


# Stock modules #


def test_fast_paths_of_stock_modules_do_not_bypass_the_recipe():
    """Otherwise nn.TransformerEncoderLayer evaluates in high precision what it trained quantized:
    its fast path reads the weights of its linear layers and never calls them."""
    torch.manual_seed(0)
    m = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    fq.convert(m, recipes.nvfp4())
    x = values(1, 4, 32, dtype=torch.float32)
    want = m.eval()(x)
    counters.reset()
    with torch.no_grad():
        got = m(x)
    assert counters.total("gemm") == 4
    torch.testing.assert_close(got, want.detach())


def test_linear_as_the_whole_model_converts():
    """Otherwise the smallest model is special."""
    torch.manual_seed(0)
    m = fq.convert(nn.Linear(32, 16), recipes.mxfp8())
    assert type(m) is fq.Linear
    m(values(4, 32, dtype=torch.float32)).sum().backward()
    assert m.weight.grad is not None


# Back #


def before_convert(family: str) -> nn.Module:
    if family == "torch":
        layers = [NamedLinear(32, 32), nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 4, 64)]
        tied = nn.Linear(32, 32)
        tied.weight = layers[1].weight
        return nn.Sequential(*layers, tied)
    return tiny(family)


def facts_of(net: nn.Module) -> dict[str, tuple]:
    """What a program may see of each module, besides values."""
    return {
        name: (
            type(m),
            m.training,
            set(vars(m)),
            {k: v for k, v in vars(m).items() if isinstance(v, (bool, int, float, str))},
            {
                n: (type(p), p.dtype, p.requires_grad)
                for n, p in m._parameters.items()
                if p is not None
            },
            {k: len(v) for k, v in vars(m).items() if k.endswith("_hooks")},
        )
        for name, m in net.named_modules()
    }


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", ["torch", "llama", "gpt2", "mixtral", "llama4_text"])
def test_unconvert_undoes_convert(family: str, quantized: bool):
    """Otherwise a model cannot go on to a library that looks for the classes of torch, or goes on
    with other values, names, ties or hooks."""
    net = before_convert(family)
    next(net.parameters()).requires_grad_(False)
    calls = []
    for module in list(net.modules())[-2:]:
        module.register_forward_hook(lambda *_: calls.append(1))
    net.eval()
    x = torch.arange(16).view(1, 16) if family != "torch" else values(2, 32, dtype=torch.float32)
    run = (lambda: net(x)) if family == "torch" else lambda: net(input_ids=x).logits
    with torch.no_grad():  # a graph would hold the parameters
        want = run()
    facts, state = facts_of(net), copy.deepcopy(net.state_dict())
    parameters = {id(p) for p in net.parameters()}
    with fq.quantized_model_init("nvfp4") if quantized else contextlib.nullcontext():
        fq.convert(net, "nvfp4")
    assert facts_of(net) != facts
    run()
    assert fq.unconvert(net) is net
    assert {id(p) for p in net.parameters()} == parameters, "an optimizer holds other parameters"
    assert facts_of(net) == facts
    assert list(net.state_dict()) == list(state)
    for name, value in net.state_dict().items():
        assert_same_bytes(value, state[name], name)
    calls.clear()
    assert_same_bytes(run().detach(), want.detach())
    assert calls
    with pytest.raises(ValueError, match="nothing converted"):
        fq.unconvert(net)
    fq.convert(net, "identity")


def test_unconvert_keeps_what_was_trained():
    """Otherwise it gives back initial values, or an optimizer goes on with weights that no model
    has."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16))
    with fq.quantized_model_init("mxfp8"):
        fq.convert(net, "mxfp8")
    optimizer = fq.optim.FusedAdam(net.parameters(), lr=0.1)
    net(values(4, 32)).square().sum().backward()
    optimizer.step()
    want = net.state_dict()["0.weight"].to(torch.bfloat16)
    fq.unconvert(net)
    assert type(net[0]) is nn.Linear and type(net[0].weight) is nn.Parameter
    assert_same_bytes(net[0].weight.detach(), want)
    with kept_step():
        fq.begin_step(1)  # of what is still converted


def refused(how: str) -> nn.Module:
    if how == "fq.unfreeze":
        net = fq.convert(nn.Sequential(nn.Linear(32, 32)).requires_grad_(False), "mxfp8")
        fq.freeze(net)
        return net
    if how == "1 holds codes":
        conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(32, 32)
        net = fq.convert(nn.Sequential(nn.ReLU(), conv1d).requires_grad_(False), "mxfp8")
        fq.freeze(net)
        return net
    net = nn.Sequential(
        nn.Linear(32, 32),
        fq.LayerNormMLP(32, 32) if how == "LayerNormMLP" else fq.GroupedLinear(2, 32, 32),
    )
    return fq.convert(net, "mxfp8", skip=["1.*"])


@pytest.mark.parametrize("how", ["fq.unfreeze", "1 holds codes", "LayerNormMLP", "GroupedLinear"])
def test_what_cannot_be_restored_is_named_before_anything_changes(how: str):
    """Otherwise half of a model is of one kind and half of the other."""
    net = refused(how)
    before = facts_of(net)
    with pytest.raises(ValueError, match=how):
        fq.unconvert(net)
    assert facts_of(net) == before


def test_libraries_that_replace_weights_are_named():
    """Otherwise torchao's quantize_ fails in a kernel, in the first forward after it, and
    quantize_dynamic leaves the layers as they are, without a word."""
    net = fq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8")
    with pytest.raises(NotImplementedError, match=r"fq.unconvert\(model\) before"):
        torch.ao.quantization.quantize_dynamic(net, {nn.Linear})
    torchao = pytest.importorskip("torchao.quantization")
    config = torchao.Int8WeightOnlyConfig()
    with pytest.raises(NotImplementedError, match=r"fq.unconvert\(model\) before"):
        torchao.quantize_(net, config)
    torchao.quantize_(fq.unconvert(net), config)
    assert net(torch.ones(2, 64)).shape == (2, 64)
    fq.convert(net.append(nn.Linear(64, 64)), "mxfp8")  # and what they replaced before stays theirs
    assert type(net[0]) is nn.Linear and net(torch.ones(2, 64)).shape == (2, 64)
    assert "whose forward or weight is not its class's" in str(fq.plan(net))
