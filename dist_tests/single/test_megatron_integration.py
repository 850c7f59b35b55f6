# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's layers, without Megatron: `dist_tests.megatron_core` and a small config stand for
its own."""

from __future__ import annotations

import argparse
import copy
import runpy
import sys
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import dist_tests.megatron_core  # noqa: F401  (before the integration)
import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import ROWWISE
from fsdp_quant.integrations import megatron
from fsdp_quant.integrations.megatron import (
    ColumnParallelGroupedLinear,
    ColumnParallelLinear,
    RowParallelGroupedLinear,
    RowParallelLinear,
)
from fsdp_quant.integrations.megatron import experts as grouped
from fsdp_quant.integrations.megatron.config import HONOURED

BF16 = torch.bfloat16
HYBRID = fq.recipes.hybrid(forward="mxfp8", backward="fp8_block")


@dataclass
class Config:
    """The fields of a TransformerConfig that these layers read, and some that they refuse."""

    params_dtype: torch.dtype = BF16
    use_cpu_initialization: bool = True
    perform_initialization: bool = True
    sequence_parallel: bool = False
    tensor_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    gradient_accumulation_fusion: bool = False
    delay_wgrad_compute: bool = False
    fp8: str | None = None
    cuda_graph_impl: str = "none"


@pytest.fixture(autouse=True)
def fresh_step():
    yield
    STEP.step, STEP.counted_by_hand = 0, False


def normal(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.02)


def column(
    recipe=HYBRID, n: int = 128, k: int = 64, config: Config | None = None, **options
) -> ColumnParallelLinear:
    torch.manual_seed(0)
    options = {"name": "layer", "init_method": normal, **options}
    return ColumnParallelLinear(k, n, config=config or Config(), recipe=recipe, **options)


def row(
    recipe=HYBRID, n: int = 128, k: int = 64, config: Config | None = None, **options
) -> RowParallelLinear:
    torch.manual_seed(0)
    given = {
        "bias": True,
        "input_is_parallel": True,
        "skip_bias_add": False,
        "name": "layer",
        "init_method": normal,
        **options,
    }
    return RowParallelLinear(k, n, config=config or Config(), recipe=recipe, **given)


def plain(layer) -> fq.Linear:
    """An fq.Linear of the same name and values."""
    made = fq.Linear(
        layer.in_features, layer.out_features, dtype=BF16, recipe=layer.recipe, name="layer"
    )
    with torch.no_grad():
        made.weight.copy_(layer.weight)
        made.bias.copy_(layer.bias)
    return made


def passed(layer, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y, bias = y if isinstance(y, tuple) else (y, None)
    y = y if bias is None else y + bias
    y.backward(dy)
    return [y, x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize(
    "make, name",
    [
        (column, "identity"),
        (column, "nvfp4"),
        (column, "hybrid"),
        (row, "identity"),
        (row, "fp8_current"),
        (row, "hybrid"),
    ],
)
def test_a_layer_alone_is_an_fq_linear(make, name: str):
    """If false, Megatron's models multiply something else than what the recipe says, or lose a
    gradient on the way."""
    recipe = HYBRID if name == "hybrid" else fq.recipes.by_name(name)
    x, dy = values(6, 32, 64, seed=1, dtype=BF16), values(6, 32, 128, seed=2, dtype=BF16)
    layer = make(recipe)
    with torch.no_grad():
        layer.bias.copy_(values(128, seed=3))
    for got, want, what in zip(
        passed(layer, x, dy), passed(plain(layer), x, dy), ("y", "dx", "dw", "db")
    ):
        if make is row and what == "y":  # its bias is added to a rounded product, as by Megatron
            continue
        assert_same_bytes(got, want, what)
    assert type(layer.weight) is nn.Parameter and type(layer.weight.data) is Tensor


@pytest.mark.parametrize("make", [column, row])
def test_a_bias_that_megatron_adds_is_handed_out(make):
    """Otherwise it is added twice, or never."""
    layer = make(skip_bias_add=True)
    x = values(4, 32, 64, seed=1, dtype=BF16)
    y, bias = layer(x)
    assert bias is layer.bias
    layer.skip_bias_add = False
    whole, none = layer(x)
    assert none is None
    assert_same_bytes(y + bias, whole)
    assert make(bias=False)(x)[1] is None


def test_codes_follow_what_megatron_writes_past_every_counter():
    """If false, a layer multiplies the weights of an earlier step: its optimizer writes flat
    buffers, through .data."""
    layer, x = column(), values(4, 32, 64, seed=1, dtype=BF16).requires_grad_()
    flat = torch.zeros(layer.weight.numel() + 64, dtype=BF16)
    before = layer.weight.data
    layer.weight.data = flat[64:].view_as(before)  # as Megatron's DDP does
    layer.weight.data.copy_(before)
    assert_same_bytes(layer(x)[0], column()(x)[0])
    master = nn.Parameter(flat.detach().float())
    optimizer = torch.optim.SGD([master], lr=1.0)
    for step in range(2):
        counters.reset()
        with fq.hold(layer):  # micro-batches of a step share codes
            for _ in range(3):
                layer(x)[0].sum().backward()
        assert counters.of("weight encode") == {
            ("layer.weight", d): 1 for d in ("rowwise", "columnwise")
        }
        master.grad = torch.full_like(master, 0.01)
        optimizer.step()
        flat.data.copy_(master)
    assert_same_bytes(layer(x)[0], plain(layer)(x))
    with torch.no_grad():
        layer.weight.mul_(2)  # torch counts this
    assert_same_bytes(layer(x)[0], plain(layer)(x))
    flat.data.mul_(2)  # and nobody this
    assert_same_bytes(layer(x)[0], plain(layer)(x))


def test_steps_of_megatrons_layers_are_their_training_forwards():
    """Otherwise histories never roll and random bits repeat: Megatron builds its layers, and its
    optimizers hold no weights."""
    layer, x = column(fq.recipes.fp8_delayed(length=4)), values(4, 32, 64, seed=1, dtype=BF16)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    seen = []
    for step in range(3):
        layer(x * 2**step)[0].sum().backward()
        for _ in range(2):  # a dense optimizer, and one of experts
            optimizer.step()
        assert STEP.step == step
        history = next(
            h
            for (_, slot, d, _), h in layer._weight_state.histories.items()
            if slot == "input" and d is ROWWISE
        )
        seen.append(history.amaxes.clone())
    amax = float(x.abs().amax())
    # Slot 0 collects the step that runs.
    assert [s.tolist() for s in seen] == [
        [amax, 0, 0, 0],
        [2 * amax, amax, 0, 0],
        [4 * amax, 2 * amax, amax, 0],
    ]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_give_the_same_gradients(reentrant: bool):
    """If false, Megatron's recomputation of activations trains another model."""
    x, dy, results = (
        values(4, 32, 64, seed=1, dtype=BF16),
        values(4, 32, 128, seed=2, dtype=BF16),
        [],
    )
    for recomputes in (False, True):
        layer, leaf = column(fq.recipes.fp8_delayed(length=4)), x.clone().requires_grad_()
        for _ in range(2):
            y = (checkpoint(layer, leaf, use_reentrant=reentrant) if recomputes else layer(leaf))[0]
            y.backward(dy)
            torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0).step()
        results.append([y, leaf.grad, layer.weight.grad])
    for got, want in zip(*results):
        assert_same_bytes(got, want)


def test_copies_and_fully_shard():
    """Otherwise a copy of a model multiplies the original's weights, or codes are made of memory
    that FSDP2 has freed."""
    layer, x = column(), values(4, 32, 64, seed=1, dtype=BF16)
    before, copied = layer(x)[0], copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.zero_()
    assert not layer(x)[0].any()
    assert_same_bytes(copied(x)[0], before)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotImplementedError, match="layer.weight is gathered by fully_shard"):
            fully_shard(copied)(x)
    finally:
        dist.destroy_process_group()


def test_megatron_finds_the_attributes_that_it_reads():
    """Otherwise gradient norms count parameters twice, experts are reduced over the wrong ranks,
    checkpoints cut wrongly."""
    for layer, dim, config in ((column(), 0, Config()), (row(), 1, Config())):
        w = layer.weight
        assert (w.tensor_model_parallel, w.partition_dim, w.partition_stride, w.allreduce) == (
            True,
            dim,
            1,
            True,
        )
        assert layer.tp_group is None and not layer.sequence_parallel and layer.config == config
    assert (column().bias.tensor_model_parallel, column().bias.partition_dim) == (True, 0)
    assert (
        not hasattr(row().bias, "tensor_model_parallel") and row().bias.sequence_parallel is False
    )
    assert column().output_size_per_partition == 128 and row().input_size_per_partition == 64
    assert column(stride=2).weight.partition_stride == 2
    experts = Config(expert_model_parallel_size=2)
    assert (
        column(config=experts, is_expert=True).weight.allreduce is False
        and column(config=experts).weight.allreduce is True
    )
    assert not column().bias.any() and column().weight.std() > 0.01
    untouched = Config(perform_initialization=False)
    assert column(config=untouched).weight.tensor_model_parallel


def test_checkpoints_are_those_of_megatrons_layers():
    """Otherwise a run cannot go on with these layers, or without them."""
    layer = column()
    state = layer.state_dict()
    assert list(state) == ["weight", "bias", "_extra_state"] and type(state["weight"]) is Tensor
    other = column(fq.recipes.fp8_current())
    with torch.no_grad():
        other.weight.zero_()
    x = values(4, 32, 64, seed=1, dtype=BF16)
    other(x)
    other.load_state_dict({k: v for k, v in state.items() if k != "_extra_state"})
    assert_same_bytes(other.weight.data, layer.weight.data)
    assert_same_bytes(other(x)[0], column(fq.recipes.fp8_current())(x)[0])


REFUSED = [
    ({"fp8": "hybrid"}, {}, "fp8='hybrid'.*formats come from the recipe"),
    ({"cuda_graph_impl": "local"}, {}, "cuda_graph_impl='local'.*--cuda-graph-impl none"),
    (
        {},
        {"skip_weight_param_allocation": True},
        "skip_weight_param_allocation=True.*Megatron's layer",
    ),
    ({}, {"keep_master_weight_for_test": True}, "keep_master_weight_for_test=True"),
    ({}, {"embedding_activation_buffer": []}, "embedding_activation_buffer"),
    ({}, {"grad_output_buffer": []}, "grad_output_buffer"),
    ({}, {"output_dtype": torch.float32}, "output_dtype=torch.float32.*wanted torch.bfloat16"),
    ({}, {"recipe": fq.recipes.nvfp4(tail=0.1)}, "tail.*fq.set_recipe"),
]


@pytest.mark.parametrize("config, options, words", REFUSED, ids=[w[:24] for *_, w in REFUSED])
def test_what_a_layer_does_not_honour_is_refused(config: dict, options: dict, words: str):
    """Otherwise a setting of a run is silently another one."""
    with pytest.raises(ValueError, match=f"layer.*{words}"):
        column(config=replace(Config(), **config), **{"recipe": HYBRID, **options})


def test_every_refused_field_of_the_config_is_refused():
    """Otherwise the table of what is honoured names a field and does not look at it."""
    for field, (honoured, _) in HONOURED.items():
        for value in honoured:
            megatron.check_config(argparse.Namespace(**{field: value}))
        with pytest.raises(ValueError, match=field):
            megatron.check_config(argparse.Namespace(**{field: "something"}))
    with pytest.raises(ValueError, match="another layer's weight"):
        column()(values(4, 32, 64, seed=1, dtype=BF16), weight=column().weight)
    with pytest.raises(ValueError, match="skip_bias_add=True"):
        row(config=Config(expert_model_parallel_size=2), is_expert=True)


def experts(make, config: Config | None = None, **options) -> nn.Module:
    torch.manual_seed(0)
    given = {
        "bias": True,
        "skip_bias_add": False,
        "name": "experts",
        "init_method": normal,
        **options,
    }
    return make(3, 64, 128, config=config or Config(), recipe=HYBRID, **given)


@pytest.mark.parametrize("make", [ColumnParallelGroupedLinear, RowParallelGroupedLinear])
def test_grouped_experts_are_a_loop_of_layers(make):
    """If false, an expert multiplies another's weights or tokens."""
    layer, x, dy = (
        experts(make),
        values(96, 64, seed=1, dtype=BF16),
        values(96, 128, seed=2, dtype=BF16),
    )
    counts = [32, 0, 64]
    y, none = layer(x, torch.tensor(counts))
    y.backward(dy)
    assert none is None
    for e, (part, into, got) in enumerate(zip(x.split(counts), dy.split(counts), y.split(counts))):
        alone = fq.Linear(64, 128, dtype=BF16, recipe=HYBRID, name=f"experts.{e}")
        with torch.no_grad():
            alone.weight.copy_(getattr(layer, f"weight{e}"))
            alone.bias.zero_()
        want = alone(part)
        want.backward(into)
        assert_same_bytes(got, want)
        assert_same_bytes(getattr(layer, f"weight{e}").grad, alone.weight.grad)
        assert_same_bytes(getattr(layer, f"bias{e}").grad, alone.bias.grad)
    assert list(layer.state_dict())[:4] == ["weight0", "bias0", "weight1", "bias1"]
    _, biases = experts(make, skip_bias_add=True)(x, counts)
    assert len(biases) == 3 and biases[2].shape == (128,)
    assert (
        layer.weight1.partition_dim == (make is RowParallelGroupedLinear)
        and layer.weight1.allreduce
    )


@pytest.fixture
def checkpointed(monkeypatch) -> nn.Module:
    """Grouped experts; stand-ins of Megatron's functions return what they are given."""
    layer = experts(ColumnParallelGroupedLinear)
    layer._groups = SimpleNamespace(ep=None, expt_dp=None)

    def sharded(tensors: dict, *_, **__) -> dict:
        return {key: SimpleNamespace(data=t, replica_id=(0, 0, 0)) for key, t in tensors.items()}

    for name, stand_in in (
        ("ensure_metadata_has_dp_cp_group", lambda _: {"dp_cp_group": None}),
        ("make_sharded_tensors_for_checkpoint", sharded),
        ("replace_prefix_for_sharding", lambda *_: None),
    ):
        monkeypatch.setattr(grouped, name, stand_in)
    return layer


def test_checkpoints_of_grouped_experts_pass_their_state_dict(checkpointed):
    """If false, a distributed checkpoint holds stale values of experts, which the hooks of
    `gather_codes` refuse."""

    def refuse(*_):
        raise fq.StaleWeightError("its codes were gathered, not its values")

    checkpointed.register_state_dict_pre_hook(refuse)
    with pytest.raises(fq.StaleWeightError, match="gathered"):
        checkpointed.sharded_state_dict()


def test_checkpoints_of_grouped_experts_are_those_of_a_layer_per_expert(checkpointed):
    """If false, layers of one expert, Megatron's or ours, cannot load a distributed checkpoint of
    grouped ones: a key is missing."""
    state = checkpointed.sharded_state_dict("experts.")
    want = dict(checkpointed.state_dict())
    want |= {f"_extra_state{e}": want["_extra_state"] for e in range(checkpointed.num_gemms)}
    want.pop("_extra_state")
    assert set(state) == {f"experts.{key}" for key in want}
    checkpointed.load_state_dict({key: state[f"experts.{key}"].data for key in want})


def reduce_by_ddp(layer: nn.Module, param: nn.Parameter, ready: list) -> None:
    """Give a weight what Megatron's DDP gives it: a `main_grad`, and the hook that adds gradients
    to it, behind the backward or behind `backward_dw`."""
    param.main_grad, param.grad_added_to_main_grad = torch.ones(param.shape), False

    def hook(*unused) -> None:
        assert param.grad is not None, "overlapped reductions need one"
        if not param.grad_added_to_main_grad:
            param.main_grad.add_(param.grad)
        param.grad = None
        ready.append(param)

    if getattr(param, "skip_backward_post_hook", False):
        layer.register_wgrad_accumulation_and_reduce_hooks(hook)
    else:
        param.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("options", ["fuses", "delays", "fuses delays"])
@pytest.mark.parametrize("make", [column, row, ColumnParallelGroupedLinear])
def test_megatrons_ddp_takes_the_wgrads_of_its_options(make, options: str):
    """If false, `gradient_accumulation_fusion` or `delay_wgrad_compute` trains on other gradients,
    or DDP reduces weights before their gradients are there, or never; or other weights are marked
    otherwise than Megatron's."""
    fuses, delays = "fuses" in options, "delays" in options
    config = Config(gradient_accumulation_fusion=fuses, delay_wgrad_compute=delays)
    is_grouped, counts = make is ColumnParallelGroupedLinear, [32, 0, 64]
    layer = experts(make, config) if is_grouped else make(config=config)
    weights = [p for name, p in layer.named_parameters() if name.startswith("weight")]
    alone, ready = [], []
    for e, weight in enumerate(weights):
        name = f"experts.{e}" if is_grouped else "layer"
        assert hasattr(weight, "skip_backward_post_hook") == delays
        alone.append(fq.Linear(64, 128, False, dtype=BF16, recipe=HYBRID, name=name))
        alone[e].fuse_wgrad_accumulation = fuses
        alone[e].weight.data.copy_(weight)
        alone[e].weight.main_grad = torch.ones(128, 64)
        reduce_by_ddp(layer, weight, ready)
    for step in range(2):
        x = values(96, 64, seed=step, dtype=BF16).requires_grad_()
        dy = values(96, 128, seed=9 + step, dtype=BF16)
        (layer(x, counts) if is_grouped else layer(x))[0].backward(dy)
        assert len(ready) == len(weights) * (step if delays else step + 1)
        if delays and step:
            layer.backward_dw()
        elif delays:
            fq.steps.backward_dw(layer)
        assert len(ready) == len(weights) * (step + 1)
        parts = zip(x.split(counts), dy.split(counts)) if is_grouped else [(x, dy)]
        for expert, (rows, into) in zip(alone, parts):
            expert(rows.detach()).backward(into)
            if not fuses:
                expert.weight.main_grad.add_(expert.weight.grad)
                expert.weight.grad = None
    for weight, expert in zip(weights, alone):
        assert torch.equal(weight.main_grad, expert.weight.main_grad) and weight.grad is None


def test_plans_and_recipes_reach_the_layers():
    """Otherwise fq.plan, fq.set_recipe and fq.state_dict leave out the layers of a Megatron
    model."""
    model = nn.ModuleDict({"up": column(), "experts": experts(ColumnParallelGroupedLinear)})
    assert {r.module for r in fq.plan(model).gemms} == {"up", "experts.0", "experts.1", "experts.2"}
    x = values(4, 32, 64, seed=1, dtype=BF16)
    before = model["up"](x)[0]
    fq.set_recipe(model, fq.recipes.fp8_current())
    assert_same_bytes(model["up"](x)[0], column(fq.recipes.fp8_current())(x)[0])
    fq.set_recipe(model, HYBRID)
    assert_same_bytes(model["up"](x)[0], before)
    fq.load_state_dict(model, fq.state_dict(model))


def test_a_recipe_survives_the_command_line():
    """Otherwise a run trains with another recipe than its arguments say."""
    recipes = [fq.recipes.by_name(name) for name in fq.recipes.names()]
    recipes += [
        HYBRID,
        fq.recipes.hybrid("nvfp4", "fp8_row", strict=False, compute_dtype=None),
        fq.recipes.nvfp4(tail=0.25),
    ]
    recipes += [
        fq.recipes.fp8_delayed(length=16, margin=1, use="newest"),
        fq.recipes.fp8_current(grad_element="e5m2"),
        fq.recipes.mxfp8(stochastic=True, square_blocks=True),
    ]
    for recipe in recipes:
        written = megatron.arguments(recipe)
        parser = megatron.add_arguments(argparse.ArgumentParser())
        args, rest = parser.parse_known_args(written)
        assert megatron.recipe_of(args) == recipe
        assert rest == [
            "--transformer-impl",
            "local",
            "--bf16",
            "--no-gradient-accumulation-fusion",
            "--no-persist-layer-norm",
        ]
    assert "--overlap-param-gather" in megatron.arguments(HYBRID, gathers_codes=True)
    with pytest.raises(ValueError, match="gpt_layer_spec in a file"):
        megatron.arguments(fq.CustomRecipe(custom_formats))


def custom_formats(role):
    return "mxfp8"


def test_what_needs_megatron_says_so(monkeypatch):
    """Otherwise a machine without Megatron fails at import, or with the name of a variable."""
    for module in ("linear", "experts", "specs"):
        monkeypatch.setitem(sys.modules, f"{megatron.__name__}.{module}", None)
    for name in ("SpecProvider", "gpt_layer_spec", "ColumnParallelLinear", "weight_proxies"):
        with pytest.raises(ImportError, match=f"{name} needs Megatron-LM .*put the checkout"):
            getattr(megatron, name)


def test_the_contract_finds_our_examples_beside_a_checkout(tmp_path, monkeypatch):
    """If false, the command of docs/megatron.md ends in an import error: `examples` of Megatron-LM
    is a package, which hides ours."""
    for name in ("examples", "megatron"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    code = "import examples.mini_megatron.flat as ours, sys; sys.exit(ours.__file__)"
    (tmp_path / "megatron" / "__init__.py").write_text(code)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("examples", "megatron")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("FSDP_QUANT_MEGATRON", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with warnings.catch_warnings(), pytest.raises(SystemExit, match=r"flat\.py"):
        runpy.run_module("dist_tests.contract.megatron")
