# SPDX-License-Identifier: Apache-2.0
"""Packed experts of transformers, which `fq.convert` takes over: one process, compiled, LoRA, and
`fully_shard`."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.laws import assert_same_bytes
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks
from dist_tests.single import hopper
from dist_tests.single.test_fuse import tiny
from fsdp_quant.counters import counters
from fsdp_quant.linear.bad_splits import raise_bad_splits
from fsdp_quant.tensor import gather_group

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text")
IDS = torch.arange(32, device="cpu").view(1, 32) % 64


def converted(family: str, recipe: fq.Recipe, skip: tuple[str, ...] = ()) -> nn.Module:
    return fq.convert(tiny(family), recipe, skip=("lm_head", *skip))


def step(net: nn.Module) -> dict[str, Tensor]:
    """Loss and gradients."""
    net.zero_grad()
    loss = net(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {"loss": loss.detach()} | {
        n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None
    }


def assert_same(
    got: dict[str, Tensor], want: dict[str, Tensor], what: str, rounding: float = 0.0
) -> None:
    """Bit for bit; or but for so much of a tensor's norm, where values are rounded at other
    places."""
    assert list(got) == list(want)
    for name, one in want.items():
        if rounding:
            assert (got[name] - one).norm() <= rounding * one.norm(), f"{what}: {name}"
        else:
            assert_same_bytes(got[name], one, f"{what}: {name}")


@pytest.mark.parametrize("family", FAMILIES)
def test_taken_over_experts_are_the_modules_own(family: str):
    """If false, experts are routed, gated or summed otherwise, or a checkpoint, a copy or a move to
    a device breaks their tie."""
    plain, net = tiny(family), converted(family, fq.recipes.identity())
    # gpt_oss rounds a product before it adds its bias, qwen3_moe before it adds up experts
    want, rounding = (step(plain), 2e-2 if family in ("gpt_oss", "qwen3_moe") else 0.0)
    assert_same(step(net), want, family, rounding)
    assert list(net.state_dict()) == list(plain.state_dict())
    memory = io.BytesIO()
    torch.save(net, memory)
    memory.seek(0)
    with torch.device("meta"):
        empty, assigned = (converted(family, fq.recipes.identity()) for _ in range(2))
    empty = empty.to_empty(device="cpu")
    assigned.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    for other in (empty, assigned):  # whose buffers no checkpoint has
        other.model.rotary_emb = copy.deepcopy(net.model.rotary_emb)
    for what, other in {
        "copied": copy.deepcopy(net),
        "pickled": torch.load(memory, weights_only=False),
        "made on meta": empty,
        "assigned": assigned,
    }.items():
        if other is not assigned:
            other.load_state_dict(net.state_dict())
        assert [n for n, _ in other.named_parameters()] == [n for n, _ in net.named_parameters()]
        (experts, *_) = (m for m in other.modules() if hasattr(m, "down_proj_product"))
        assert experts.down_proj is experts.down_proj_product.weight, what
        assert_same(step(other), want, what, rounding)
    notes = fq.plan(converted(family, fq.recipes.mxfp8())).notes
    assert sum("4 experts, " in note for note in notes) == 4, "two layers of two weights"
    assert not any("Experts" in note for note in notes), "nothing of experts is in high precision"


def test_experts_that_cannot_be_taken_over_are_refused():
    """If false, experts multiply weights that nobody gathers, or those of other ranks."""
    experts = converted("mixtral", fq.recipes.mxfp8()).model.layers[0].mlp.experts
    experts._is_expert_parallel = True
    with pytest.raises(NotImplementedError, match="spreads over ranks"):
        experts(
            torch.zeros(4, 32, dtype=torch.bfloat16),
            torch.zeros(4, 2, dtype=torch.long),
            torch.ones(4, 2),
        )
    run_ranks(2, _sharded_first)


def test_rules_of_a_recipe_reach_the_plan_of_packed_experts():
    """If false, fq.plan does not say which experts a rule of the recipe changed."""
    (note,) = (
        note
        for note in fq.plan(
            converted("mixtral", fq.recipes.per_layer("mxfp8", {"*experts*": "nvfp4"}))
        ).notes
        if note.startswith("per_layer")
    )
    assert note.startswith("per_layer: '*experts*' is nvfp4  ["), note


@pytest.mark.parametrize("family", laws.every_second(list(FAMILIES), 0))
def test_experts_that_are_changed_later_are_the_modules_own(family: str, monkeypatch):
    """If false, another gate, limit or forward of experts has no effect, in eager mode or in
    graphs."""
    torch.compiler.reset()
    plain, net = tiny(family).float(), converted(family, fq.recipes.identity()).float()

    def experts_of(model: nn.Module) -> nn.Module:
        return next(m for m in model.modules() if "Experts" in type(m).__name__)

    of_plain, taken = experts_of(plain), experts_of(net)
    cls, forward = type(of_plain), type(of_plain).forward
    for what in ("gate", "forward"):
        for experts in (of_plain, taken):
            if what == "forward":
                monkeypatch.setattr(cls, "forward", lambda self, *args: 2 * forward(self, *args))
            elif family == "gpt_oss":
                experts.limit = 0.01
            else:
                experts.act_fn = nn.ReLU()
        want = plain(input_ids=IDS).logits
        torch.testing.assert_close(net(input_ids=IDS).logits, want, msg=what)
        assert "has changed since fq.convert" in "\n".join(fq.plan(net).notes)
    compiled = torch.compile(taken, fullgraph=False, backend="aot_eager")
    given = [torch.randn(8, 32)]
    if family != "llama4_text":
        given += [torch.arange(16).view(8, 2) % 4, torch.rand(8, 2)]
    torch.testing.assert_close(compiled(*given), of_plain(*given))


def test_a_forward_of_someones_under_transformers_flags_is_left_alone():
    """If false, experts are known by flags, whatever their forward computes."""
    net = tiny("mixtral")
    experts = net.model.layers[0].mlp.experts

    class Own(type(experts)):
        def forward(self, x: Tensor, *routes: Tensor) -> Tensor:
            return super().forward(x.clamp(-1000, 1000), *routes)

    experts.__class__ = Own
    fq.convert(net, fq.recipes.mxfp8(), skip="lm_head")
    assert type(experts) is Own and hasattr(net.model.layers[1].mlp.experts, "down_proj_product")
    assert "of Own, Own.forward" in "\n".join(fq.plan(net).notes)


@pytest.mark.parametrize("index", [-1, 4, 7])
def test_routes_of_no_expert_are_refused_by_their_index(index: int):
    """If false, a route of no expert is multiplied by the first one, or the message is about splits
    that nobody gave."""
    experts = converted("mixtral", fq.recipes.mxfp8()).model.layers[0].mlp.experts
    routes = torch.arange(16).view(8, 2) % 4
    x, weights = torch.zeros(8, 32, dtype=torch.bfloat16), torch.ones(8, 2)
    routes[3, 0] = index
    with pytest.raises(
        ValueError, match=r"experts: 1 of 16 entries of top_k_index .* wanted 0 to 3"
    ):
        experts(x, routes, weights)
    refused = pytest.raises(
        ValueError, match="top_k_index gave some of 16 rows no expert of 0 to 3"
    )
    with hopper.emulated(), refused:  # where the host does not look at routes
        experts(x, routes, weights)
        raise_bad_splits()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_routes_may_be_narrow_integers(dtype: torch.dtype):
    """If false, indices of few bits are compared with a number of experts that they cannot hold."""
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    sizes = {"hidden_size": 16, "moe_intermediate_size": 16, "num_experts": 300}
    config = modeling.Qwen3MoeConfig(**sizes, experts_implementation="grouped_mm")
    experts = modeling.Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    fq.convert(net := nn.ModuleDict({"experts": experts}), "fp8_row")
    assert hasattr(net["experts"], "down_proj_product")
    x, routes = laws.values(8, 16), torch.arange(16).view(8, 2) * 7
    want = experts(x, routes, torch.ones(8, 2))
    assert_same_bytes(experts(x, routes.to(dtype), torch.ones(8, 2)), want, "narrow")


class _Added(nn.Module):
    """As an adapter of rank 1."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.a, self.b = (
            nn.Parameter(weight[:, :1].detach().clone()),
            nn.Parameter(weight[:, :, :1].detach().clone()),
        )

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


@pytest.mark.parametrize("name", ["identity", "mxfp8"])
def test_parametrized_experts_multiply_what_the_module_has(name: str):
    """If false, LoRA on experts trains nothing, or the base, in silence."""
    results = []
    for make in (lambda: converted("mixtral", fq.recipes.by_name(name)), lambda: tiny("mixtral")):
        net = make().requires_grad_(False)
        experts = net.model.layers[0].mlp.experts
        parametrize.register_parametrization(experts, "down_proj", _Added(experts.down_proj))
        results.append(step(net))
    got, want = results
    assert set(got) == set(want) and len(got) == 3, "of the adapter alone"
    if name == "identity":
        assert_same(got, want, "values")
    else:
        sizes = [(got[k] - want[k]).norm() / want[k].norm() for k in want]
        assert 0 < max(sizes) < 0.2, sizes


def some_of(layers: nn.ModuleList) -> list[nn.Module]:
    """The layers to compile: every second, each of which makes graphs of its own, or all."""
    return laws.every_second(list(layers), 1)


COMPILED = ("identity", "fp8_current", "mxfp8", "fp8_delayed")


@pytest.mark.parametrize(  # a diagonal, without its slow end
    "family, name",
    laws.sample([(f, name) for f in FAMILIES for name in COMPILED], 5)[
        : None if laws.EVERYTHING else 3
    ],
)
def test_compiled_experts_train_to_eager_bits(family: str, name: str):
    """If false, a compiled mixture of experts breaks its graphs at every layer, or trains another
    model."""
    torch.compiler.reset()
    recipe = fq.recipes.by_name(name)
    eager, net = (
        fq.convert(tiny(family).to(torch.bfloat16), recipe, skip="lm_head") for _ in range(2)
    )
    for layer in some_of(net.model.layers):
        layer.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_same(step(net), step(eager), f"{family} {name}")


def _sharded_first(rank: int, world: int) -> None:
    net = tiny("mixtral")
    for layer in net.model.layers:
        fully_shard(layer)
    for grouped in ((), "experts"):
        with pytest.raises(
            ValueError,
            match=r"layers.0.mlp.experts.* call fq.convert before fully_shard, .* in skip=",
        ):
            fq.convert(net, fq.recipes.mxfp8(), skip="lm_head", grouped=grouped)
    skip = ["lm_head", "experts"]
    notes = fq.plan(fq.convert(net, fq.recipes.mxfp8(), skip=skip)).notes
    assert any("MixtralExperts, skip='experts'" in note for note in notes), notes


def train(net: nn.Module) -> list[Tensor]:
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.5), []
    for _ in range(3):
        losses.append(step(net)["loss"])
        optimizer.step()
    return losses


def _trained(rank: int, world: int, recipe: fq.Recipe, compiled: bool, arch: str = "") -> None:
    # ranks do, of weights as small as these: such gathers are made anew
    cuts_blocks = recipe.name in ("mxfp8", "fp8_block")
    again, repeat = [], gather_group._Sent.repeat
    with (
        pytest.MonkeyPatch.context() as patched,
        hopper.emulated(arch) if arch else contextlib.nullcontext() as gpu,
    ):
        patched.setattr(
            gather_group._Sent, "repeat", lambda *args: again.append(args) or repeat(*args)
        )
        skip = ("q_proj", "k_proj", "v_proj", "o_proj") if arch and cuts_blocks else ()
        counters.reset()
        _train_and_compare(recipe, compiled, skip)
        assert arch != "sm_90a" or gpu.count("grouped_gemm"), "one product for all"
        if arch == "sm_100f":
            domains = {domain for domain, *_ in counters.of("gemm")}
            waits = [why for why in counters.of("departure") if "token splits" in str(why)]
            assert "bf16" in domains and not waits, "one product for all, of values"
    # delayed: the matrices of other ranks are encoded too, for their histories
    repeats = arch and recipe.name != "fp8_delayed"
    assert len(again) == (8 if repeats else 0), (
        f"{len(again)} gathers of 3 steps of two layers were launches of before"
    )


def _train_and_compare(recipe: fq.Recipe, compiled: bool, skip: tuple[str, ...]) -> None:
    alone, net = (converted("mixtral", recipe, skip) for _ in range(2))
    want = train(alone)
    for layer in some_of(net.model.layers) if compiled else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    for module in (*net.model.layers, net):
        fully_shard(module)
    got = train(net)
    for i, (a, b) in enumerate(zip(got, want)):
        assert_same_bytes(a, b, f"{recipe.name}: loss {i}")
    assert list(get_model_state_dict(net)) == list(alone.state_dict())
    assert_same(nets.full_state(net), alone.state_dict(), recipe.name)
    planned = fq.plan(net).weight_bytes
    of_experts = {name: sizes for name, sizes in planned.items() if "experts" in name}
    elements = {"gate_up_proj": 4 * 128 * 32, "down_proj": 4 * 32 * 64}
    assert len(of_experts) == 4, planned.keys()
    for name, (forward, _) in of_experts.items():
        numel = next(n for part, n in elements.items() if part in name)
        assert numel <= forward <= 1.2 * numel, f"{name}: {forward} bytes of {numel} codes"


def _copied(rank: int, world: int) -> None:
    net = converted("mixtral", fq.recipes.mxfp8())
    for module in (*net.model.layers, net):
        fully_shard(module)
    train(net)
    net.zero_grad()  # torch copies no gradients that are DTensors
    parts = {n: m for n, m in net.named_modules() if n.endswith((".experts", "q_proj"))}
    assert len(parts) == 4
    for name, module in parts.items():
        for got, want in zip(copy.deepcopy(module).parameters(), module.parameters(), strict=True):
            assert_same_bytes(got.to_local(), want.to_local(), name)
            assert got.to_local().data_ptr() != want.to_local().data_ptr()


def test_parts_of_a_sharded_model_are_copied():
    """If false, a copy reads the weight that FSDP2 registers in turn, whose memory is freed."""
    run_ranks(2, _copied)


SHARDED = ["mxfp8", "fp8_delayed", "fp8_block", "fp8_current", "fp8_row"]
EMULATED = [*((name, "sm_90a") for name in SHARDED), ("mxfp8", "sm_100f"), ("fp8_block", "sm_100f")]


def in_both_modes(cases: list) -> list:
    """(case, whether it is compiled): all, or every second and one that is compiled."""
    both = [(case, compiled) for case in cases for compiled in (False, True)]
    return both if laws.EVERYTHING else [*((case, False) for case in cases[::2]), (cases[1], True)]


@pytest.mark.parametrize(("name", "compiled"), in_both_modes(SHARDED))
def test_sharded_experts_train_as_in_one_process_and_travel_as_codes(name: str, compiled: bool):
    """If false, fully_shard gathers experts in high precision, trains others, or they break the
    graphs of their layer."""
    run_ranks(2, _trained, fq.recipes.by_name(name), compiled)


@pytest.mark.parametrize(("case", "compiled"), in_both_modes(EMULATED))
def test_sharded_experts_of_an_emulated_gpu_train_as_in_one_process(
    case: tuple[str, str], compiled: bool
):
    """If false, one product for all reads codes of another direction, expert or layout than FSDP2
    gathered."""
    name, arch = case
    run_ranks(2, _trained, fq.recipes.by_name(name), compiled, arch)
