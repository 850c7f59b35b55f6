# SPDX-License-Identifier: Apache-2.0
"""What a user does wrong, and what the library says: what, got, wanted, what to do. And what looks
wrong, and works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import values
from fsdp_quant import recipes
from fsdp_quant.parallel import ColumnParallelLinear


def net(k: int = 64, n: int = 64, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, n, **options))


def with_parameter(name: str, *shape: int) -> nn.Sequential:
    m = net()
    setattr(m[0], name, nn.Parameter(torch.zeros(shape)))
    return m


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return net()


def tied() -> nn.Module:
    m = nn.ModuleDict({"embed": nn.Embedding(64, 64), "lm_head": nn.Linear(64, 64, bias=False)})
    m["lm_head"].weight = m["embed"].weight
    return m


def stepped_by_another() -> None:
    m = net()
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    with fq.quantized_model_init("mxfp8"):
        fq.convert(m, "mxfp8")
    m(x()).sum().backward()
    optimizer.step()


def written_in_between() -> None:
    with fq.quantized_model_init("mxfp8"):
        m = fq.convert(net(), "mxfp8")
    optimizer = fq.optim.FusedAdam(m.parameters())
    losses = []
    for _ in range(2):
        losses.append(m(x().requires_grad_()).sum())
        if len(losses) == 1:
            m(x()).sum().backward()
            optimizer.step()
    losses[0].backward()


def trained_after_freeze() -> None:
    m = fq.convert(net(), "mxfp8").requires_grad_(False)
    fq.freeze(m)
    m.requires_grad_(True)
    m(x()).sum().backward()
    torch.optim.AdamW(m.parameters()).step()


def under_hold() -> None:
    m = fq.convert(net(), "mxfp8")
    with fq.hold(m):
        m(x())
        with torch.no_grad():
            m[0].weight.add_(1)
        m(x())


def x(dtype: torch.dtype = torch.float32, k: int = 64) -> Tensor:
    return values(32, k, seed=1, dtype=dtype)


def mixed_dtypes() -> Tensor:
    m = fq.convert(net(dtype=torch.bfloat16), "mxfp8")
    m[0].bias = nn.Parameter(m[0].bias.float())
    return m(x())


def local_factory() -> Callable:
    return lambda role: "mxfp8"


def to_nothing(role: fq.Role) -> None:
    return None


class Mistake(NamedTuple):
    do: Callable[[], object]
    says: str


MISTAKES = {
    "a number as skip": Mistake(
        lambda: fq.convert(net(), "mxfp8", skip=3), r"skip is 3; it takes names and globs of layers"
    ),
    "a filter function without a result": Mistake(
        lambda: fq.convert(net(), "mxfp8", skip=lambda path, module: print(end="")),
        r"skip: <lambda> returned no bool, but None",
    ),
    "a pattern's name as fuse": Mistake(
        lambda: fq.convert(net(), "mxfp8", fuse="mlp"),
        r"fuse is 'mlp'; wanted True, False or patterns",
    ),
    "every layer skipped": Mistake(
        lambda: fq.convert(net(), "mxfp8", skip=["*"]), r"those that it has are in skip="
    ),
    "a quantizer as recipe": Mistake(
        lambda: fq.convert(net(), fq.Quantizer("mxfp8")), r"got mxfp8, a Quantizer of one tensor"
    ),
    "frozen before convert": Mistake(
        lambda: fq.freeze(net().requires_grad_(False)), r"fq.freeze found no fq.Linear; call"
    ),
    "an optimizer of frozen codes": Mistake(
        lambda: trained_after_freeze(),
        r"would write 0.weight, a Quant.* call fq.unfreeze\(model\) before the optimizer is made",
    ),
    "converted twice": Mistake(
        lambda: fq.convert(fq.convert(net(), "mxfp8"), "nvfp4"),
        r"no nn.Linear to convert \(0 skipped, 0 tied to an embedding\): 0 are quantized layers "
        r"already; change their recipe with "
        r"fq.set_recipe\(model, recipe\)",
    ),
    "fp64 weights": Mistake(
        lambda: fq.convert(net(dtype=torch.float64), "mxfp8"),
        r"0.weight is torch.float64; fq.convert takes fp32, bf16 and fp16 weights: cast the model "
        r"\(model.float\(\)\), or name",
    ),
    "fp64 input": Mistake(
        lambda: fq.convert(net(), "mxfp8")(x(torch.float64)),
        "0: input is torch.float64; a linear layer multiplies bf16, fp16 and fp32: cast it first",
    ),
    "integers in": Mistake(
        lambda: fq.convert(net(), "mxfp8")(torch.zeros(2, 64, dtype=torch.int64)),
        "0: input is torch.int64; .*cast it first",
    ),
    "model on meta": Mistake(
        lambda: fq.convert(on_meta(), "mxfp8")(x()),
        r"0: input is on cpu and the weight on meta; move one of them \(a model made on meta: "
        r"model.to_empty",
    ),
    "input of another size": Mistake(
        lambda: fq.convert(net(), "mxfp8")(x(k=63)),
        r"0: input is \[32, 63\], its last dim must be 64",
    ),
    "no process group": Mistake(
        lambda: ColumnParallelLinear(64, 64, None),
        "linear: group is None; wanted the process group of tensor parallelism: call "
        "torch.distributed.init_process_group",
    ),
    "optimizer of plain weights over codes": Mistake(
        stepped_by_another,
        "0.weight is a quantized parameter, and this SGD holds no fp32 master of it; step it with "
        "fq.optim.FusedAdam",
    ),
    "stepped between forward and backward": Mistake(
        written_in_between,
        "0.weight, a quantized parameter, was written between the forward and the backward.*; step "
        "the optimizer",
    ),
    "written inside fq.hold": Mistake(
        under_hold,
        "0.weight was written inside fq.hold.*; leave the context before the weights change",
    ),
    "grouped matches nothing": Mistake(
        lambda: fq.convert(net(), "mxfp8", grouped="experts"),
        r"grouped .*: 'experts' matches no layer; the model has none",
    ),
    "fuse matches nothing": Mistake(
        lambda: fq.convert(net(), "mxfp8", fuse=fq.MLPPattern("mlp")),
        "fuse: 'mlp' matches no module of Sequential; name one of its modules, or pass fuse=True",
    ),
    "per_layer matches nothing": Mistake(
        lambda: fq.convert(net(), recipes.per_layer("mxfp8", {"up": "nvfp4"})),
        "'up' matches no layer; the model has 0",
    ),
    "recipe of a wrong type": Mistake(
        lambda: fq.convert(net(), torch.bfloat16),
        r"fq.convert wants a recipe, got torch.bfloat16; pass fq.recipes.mxfp8\(\)",
    ),
    "recipe not called": Mistake(
        lambda: fq.set_recipe(net(), recipes.mxfp8), "makes a recipe; call it: fq.recipes.mxfp8"
    ),
    "recipe name unknown": Mistake(
        lambda: fq.convert(net(), "mxpf8"), "unknown recipe 'mxpf8'; known recipes: bf16, fp8_block"
    ),
    "recipe in place of bias": Mistake(
        lambda: fq.Linear(64, 64, "mxfp8"),
        "bias is 'mxfp8'; wanted True or False, and a recipe by its name: recipe='mxfp8'",
    ),
    "recipe of layers for one layer": Mistake(
        lambda: fq.Linear(64, 64, recipe=recipes.per_layer("mxfp8")),
        "wants Recipe, got per_layer.*; give fq.convert that one",
    ),
    "recipe with a lambda": Mistake(
        lambda: fq.CustomRecipe(local_factory()), "must be a module-level function"
    ),
    "recipe that answers None": Mistake(
        lambda: fq.convert(net(), fq.CustomRecipe(to_nothing)),
        "returned None for Role.*; return 'identity' for a tensor that is not",
    ),
    "option unknown": Mistake(
        lambda: recipes.mxfp8(element="e5m2"),
        "mxfp8 has no option element; options of all recipes: backward_override.*; switches: grad_",
    ),
    "switch of other formats": Mistake(
        lambda: recipes.mxfp8(rotation=True),
        "mxfp8: rotation=True needs a 4-bit format in the backward; switches of this recipe: grad_",
    ),
    "arguments swapped": Mistake(
        lambda: fq.convert("mxfp8", net()),
        r"fq.convert\(model, recipe\): got 'mxfp8'; wanted an nn.Module",
    ),
    "bias of another size": Mistake(
        lambda: fq.convert(with_parameter("bias", 3), "mxfp8"),
        r"0.bias is \[3\]; the weight \[64, 64\] wants \[64\]",
    ),
    "3-D weight": Mistake(
        lambda: fq.convert(with_parameter("weight", 2, 64, 64), "mxfp8"),
        r"0.weight is \[2, 64, 64\]; an nn.Linear of 64 input features multiplies \[out, 64\]. "
        r"Experts \[E, out, in\] .* grouped=",
    ),
    "unsupported module": Mistake(
        lambda: fq.convert(nn.Sequential(nn.Conv2d(3, 3, 3), nn.LSTM(8, 8)), "mxfp8"),
        r"Sequential has no nn.Linear to convert \(0 skipped, .*\); its parameters are in Conv2d, "
        r"LSTM, and fq.convert takes nn.Linear",
    ),
    "only a tied head": Mistake(
        lambda: fq.convert(tied(), "mxfp8"),
        r"no nn.Linear to convert \(0 skipped, 1 tied to an embedding\)",
    ),
    "not converted: set_recipe": Mistake(
        lambda: fq.set_recipe(net(), "mxfp8"),
        r"found no fq.Linear; call fq.convert\(model, recipe\) first",
    ),
    "not converted: plan": Mistake(
        lambda: fq.plan(net()), r"found no fq.Linear; call fq.convert\(model, recipe\) first"
    ),
    "no tensor core does it": Mistake(
        lambda: fq.convert(net(), recipes.mxfp8(require_native=True)),
        "0: fprop multiplies .* require_native=True; choose a pair",
    ),
    "fp16 where bf16 was planned": Mistake(
        lambda: fq.convert(net(dtype=torch.float16), recipes.nvfp4(require_native=True)),
        "0: fprop multiplies .* require_native=True",
    ),
    "splits of another batch": Mistake(
        lambda: fq.GroupedLinear(2, 64, 64, recipe="mxfp8", name="moe")(x(), [1, 2]),
        r"moe: splits give \[1, 2\] rows to 2 experts, 3 in all; wanted 2 counts, none negative, "
        r"that add up to the input's 32 rows",
    ),
    "a tensor of two directions as an operand": Mistake(
        lambda: fq.gemm(fq.Quantizer("mxfp8").quantize(x()), x()),
        r"gemm wants codes of a direction, as x.rowwise, got .*QuantizedTensor'>, .*Tensor",
    ),
    "step that is no number": Mistake(
        lambda: fq.begin_step("3"),
        "fq.begin_step: step is '3'; wanted an int from 0",
    ),
    "step below 0": Mistake(lambda: fq.begin_step(-1), "fq.begin_step: step is -1; wanted"),
    "a model as the micro-batch": Mistake(
        lambda: fq.begin_step(1, net()),
        r"fq.begin_step: micro_batch is Sequential\((?s:.){,300}; wanted an int from 0",
    ),
    "a model as the seed": Mistake(
        lambda: fq.begin_step(1, 0, net()),
        r"fq.begin_step: seed is Sequential\((?s:.){,300}; wanted an int",
    ),
    "a GPU by its trade name": Mistake(
        lambda: fq.plan(fq.convert(net(), "mxfp8"), on="H100"),
        "'H100' is no GPU of ours: wanted one of sm_80, .*sm_90a",
    ),
    "a model as the recipe": Mistake(
        lambda: fq.set_recipe("mxfp8", nn.Sequential(*(net() for _ in range(99)))),
        r"fq.set_recipe wants a recipe, got Sequential\((?s:.){,300}; pass fq.recipes",
    ),
    "a recipe by the name of a format": Mistake(
        lambda: fq.convert(net(), "fp8_tensor"), "pass 'fp8_current' or 'fp8_delayed'"
    ),
    "inspect before convert": Mistake(
        lambda: fq.inspect(net()),
        r"inspect found no fq.Linear; call fq.convert\(model, recipe\) first",
    ),
}

# Code of TransformerEngine and torchao, with fq in the place of their names.
MISTAKES |= {
    "rowwise_quantizer=": Mistake(
        lambda: fq.HybridQuantizer(rowwise_quantizer=fq.Quantizer("mxfp8")),
        "HybridQuantizer has no rowwise_quantizer=: pass rowwise=",
    ),
    "enabled= of parameters": Mistake(
        lambda: fq.quantized_model_init(enabled=True, recipe="mxfp8"),
        "quantized_model_init has no enabled=: leave it out",
    ),
    "enabled, by position": Mistake(
        lambda: fq.autocast(True).__enter__(), "got True; pass a recipe; the second argument"
    ),
    "fp8_recipe=": Mistake(
        lambda: fq.autocast(enabled=True, fp8_recipe="mxfp8"), "no fp8_recipe=: pass recipe="
    ),
    "preserve_high_precision_init_val=": Mistake(
        lambda: fq.quantized_model_init("mxfp8", preserve_high_precision_init_val=True),
        "masters start from the initial values",
    ),
    "master_weights=": Mistake(
        lambda: fq.optim.FusedAdam(net().parameters(), master_weights=True),
        "FusedAdam has no master_weights=: leave it out",
    ),
    "rowwise_with_gw_hp": Mistake(
        lambda: fq.convert(net(), "rowwise_with_gw_hp"), r"pass a fq.CustomRecipe.*from_torchao.md"
    ),
    "filter_fn=": Mistake(
        lambda: fq.convert(net(), "mxfp8", filter_fn=lambda module, path: True), "pass skip="
    ),
    "a name of theirs": Mistake(
        lambda: fq.fp8_autocast(True), "no attribute 'fp8_autocast'.*from_"
    ),
    "params_dtype=": Mistake(
        lambda: fq.Linear(64, 64, params_dtype=torch.bfloat16),
        "Linear has no params_dtype=: pass dtype=",
    ),
    "ffn_hidden_size=": Mistake(
        lambda: fq.LayerNormMLP(64, ffn_hidden_size=128),
        "LayerNormMLP has no ffn_hidden_size=: pass ffn_size=",
    ),
    "m_splits=": Mistake(
        lambda: fq.GroupedLinear(2, 64, 64)(x(), m_splits=[16, 16]),
        "GroupedLinear.forward has no m_splits=: pass splits=: a list is counts.*a tensor is ends",
    ),
    "is_first_microbatch=": Mistake(
        lambda: fq.LayerNormLinear(64, 64)(x(), is_first_microbatch=True),
        r"LayerNormLinear.forward has no is_first_microbatch=.*with fq.hold\(model\):",
    ),
    "fp8_format= of a recipe": Mistake(
        lambda: recipes.fp8_delayed(fp8_format="HYBRID", amax_history_len=16),
        r"no option amax_history_len \(pass length=\), fp8_format \(.*grad_element='e5m2'",
    ),
    "fp8_format= of a scaling": Mistake(
        lambda: fq.DelayedScaling(fp8_format="HYBRID"), "no fp8_format=.*grad_element='e5m2'"
    ),
    "'fp8' as recipe": Mistake(
        lambda: fq.convert(net(), "fp8"), "unknown recipe 'fp8'; pass 'fp8_current' or"
    ),
    "'qat' as recipe": Mistake(
        lambda: fq.convert(net(), "qat"), r"unknown recipe 'qat'; pass fq.recipes.qat\('mxfp4'\)"
    ),
    "a module called": Mistake(
        lambda: fq.checkpoint(net(), x()), "is a module.*torch.utils.checkpoint.checkpoint"
    ),
    "a scaling as recipe": Mistake(
        lambda: fq.convert(net(), fq.DelayedScaling()),
        r"got a DelayedScaling; pass fq.recipes.fp8_delayed\(",
    ),
    "torchao's config as recipe": Mistake(
        lambda: fq.convert(net(), type("Float8LinearConfig", (), {})()),
        "got a Float8LinearConfig; pass fq.recipes.fp8_current",
    ),
    "torchao's keywords": Mistake(
        lambda: fq.convert(net(), module_filter_fn=lambda module, name: True),
        "convert has no module_filter_fn=: pass skip=",
    ),
}
_REFUSED = ValueError, NotImplementedError, fq.StaleWeightError, TypeError, AttributeError


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_told_with_what_to_do(mistake: Mistake):
    """If false, a user reads a traceback of ours, or trains something else than was asked for."""
    with pytest.raises(_REFUSED, match=mistake.says):
        mistake.do()


def test_a_refused_model_is_left_as_it_was():
    """If false, a mistake that is mended in place meets a model that is half converted."""
    for m in (
        net(dtype=torch.float64),
        with_parameter("bias", 3),
        with_parameter("weight", 2, 64, 64),
    ):
        with pytest.raises(ValueError):
            fq.convert(m, "mxfp8")
        assert type(m[0]) is nn.Linear


# What works #


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_block"])
def test_sizes_that_fill_no_block_work(name: str):
    """If false, K of 30 is refused or multiplied wrongly."""
    m = net(30, 30)
    want = m(x(k=30))
    got = fq.convert(m, name)(x(k=30))
    got.sum().backward()
    assert (got - want).norm() < 0.25 * want.norm() and m[0].weight.grad.shape == (30, 30)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_delayed"])
def test_fp16_models_work(name: str):
    """If false, a format without an fp16 kernel is refused, where the reference has one."""
    m = fq.convert(net(dtype=torch.float16), name)
    m(x(torch.float16)).sum().backward()
    assert m[0].weight.grad.dtype is torch.float16 and m[0].weight.grad.isfinite().all()


def test_dtypes_that_differ_work_as_documented():
    """If false, an fp32 bias or input of a bf16 layer ends the run: the output has the input's
    dtype."""
    y = mixed_dtypes()
    assert y.dtype is torch.float32
    y.sum().backward()


def test_an_optimizer_made_before_convert_trains():
    """If false, an optimizer holds parameters that the model no longer has, and nothing is
    trained."""
    m = net()
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    parameters = list(m.parameters())
    fq.convert(m, "mxfp8")
    before = copy.deepcopy(m.state_dict())
    m(x()).sum().backward()
    optimizer.step()
    assert all(a is b for a, b in zip(parameters, m.parameters(), strict=True))
    assert all(not torch.equal(before[key], value) for key, value in m.state_dict().items())


def test_a_transposed_weight_trains():
    """If false, a weight that is not contiguous multiplies as another one."""
    m = net()
    m[0].weight = nn.Parameter(m[0].weight.detach().clone().t().contiguous().t())
    assert not m[0].weight.is_contiguous()
    want = copy.deepcopy(m)
    want[0].weight = nn.Parameter(want[0].weight.detach().contiguous())
    results = [fq.convert(model, "mxfp8")(x()) for model in (m, want)]
    assert torch.equal(*results)
    results[0].sum().backward()
    assert m[0].weight.grad.shape == (64, 64)
