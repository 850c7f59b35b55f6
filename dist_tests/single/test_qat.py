# SPDX-License-Identifier: Apache-2.0
"""`recipes.qat`: the forward multiplies the codes that are exported, and the backward is
straight-through."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.bench.learning import Language, Model, Size, loss_of
from dist_tests.bench.rounding import SIMULATIONS
from dist_tests.laws import assert_same_bytes, values
from dist_tests.multi.nets import recorded_weights
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.checkpoint.verification import _recipes_in
from fsdp_quant.formats import COLUMNWISE, ROWWISE
from fsdp_quant.linear.plan import build_plan
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.storage import Storage, to_storage

DOCS = Path(__file__).parents[2] / "docs"
WEIGHTS = ("mxfp4", "nvfp4", "mxfp6", "fp8_128x128")
M, K, N = 48, 256, 144


def net(recipe: fq.Recipe, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Linear(K, N, dtype=torch.bfloat16), nn.Linear(N, 8, dtype=torch.bfloat16)
    return fq.convert(nn.Sequential(*layers), recipe, skip=["1"])


def decoded_by_compressed_tensors(folder: Path, layer: str) -> Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    inputs, bits = scheme.input_activations, scheme.weights.num_bits
    assert (inputs is None) is (bits == 4), "inputs of 8 bits in training have 4 in the server"
    tensors = load_file(folder / "model.safetensors").items()
    of_layer = {n.removeprefix(f"{layer}."): t for n, t in tensors if n.startswith(f"{layer}.")}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(of_layer, scheme)["weight"]


def codes_of(seen: list) -> Storage:
    """The rowwise codes of the weight that the last forward multiplied."""
    return [to_storage(codes) for direction, codes, _ in seen if direction is ROWWISE][-1]


@pytest.mark.parametrize("weight", [w for w in WEIGHTS if w != "mxfp6"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_exported_codes_are_those_of_the_last_forward(weight: str, backend: str | None, tmp_path):
    """If false, what is served was never trained: the file has other codes than the last forward
    multiplied, or another library decodes them to other values."""
    pytest.importorskip("compressed_tensors")
    model, x = net(recipes.qat(weight)), values(M, K)
    run = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    last = run(x)
    with recorded_weights() as seen:
        assert_same_bytes(last, model(x), "the output of a graph")
    fq.export(model, tmp_path)
    want = codes_of(seen)
    base = fq.from_pretrained_quantized(net(recipes.qat(weight), 1), tmp_path, frozen=True)
    for name, buffer in to_storage(base[0].weight.rowwise).buffers().items():
        if name != "tensor_amax":  # of which a file holds the inverse
            assert_same_bytes(buffer, want.buffers()[name], name)
    assert_same_bytes(base(x), last, "the output of the codes of the file")
    theirs = decoded_by_compressed_tensors(tmp_path, "0")
    tolerance = 2.0**-7 if weight == "nvfp4" else 0.0  # one ulp: they divide by the inverse
    ours = want.dequantize(theirs.dtype)
    torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=0.0)
    assert weight == "nvfp4" or (ours.unique().numel() > 8 and torch.equal(theirs, ours))


@pytest.mark.parametrize("gradients", [None, "identity"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_backward_multiplies_the_weight_of_the_forward(weight: str, gradients: str | None):
    """If false, dgrad multiplies other values than the forward, so that gradients are of another
    function; or wgrad is not that of the weight as it was before quantization."""
    layer = fq.Linear(K, N, bias=False, recipe=recipes.qat(weight, gradients=gradients))
    x, dy = values(M, K, dtype=torch.float32), values(M, N, seed=1, dtype=torch.float32)
    x.requires_grad_()
    with recorded_weights() as seen:
        y = layer(x)
    y.backward(dy)
    w = codes_of(seen).decode().double()
    eight = "fp8_1x128" if weight == "fp8_128x128" else "mxfp8"
    inputs = fq.HybridQuantizer(eight, gradients or eight).quantize(x.detach())
    outputs = Quantizer(gradients or eight).quantize(dy)
    decoded = {
        (name, d): getattr(of, d.value).dequantize(torch.float64)
        for name, of in (("x", inputs), ("dy", outputs))
        for d in (ROWWISE, COLUMNWISE)
    }
    wanted = {
        "y": (y, decoded["x", ROWWISE] @ w.t()),
        "dx": (x.grad, decoded["dy", ROWWISE] @ w),
        "dw": (layer.weight.grad, decoded["dy", COLUMNWISE].t() @ decoded["x", COLUMNWISE]),
    }
    for name, (got, want) in wanted.items():
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < 1e-6, f"{name}: {error}"
    assert not torch.equal(w, layer.weight.detach().double())


@pytest.mark.parametrize("weight", ["mxfp4", "nvfp4"])
def test_gradients_are_those_of_fake_quantization(weight: str):
    """If false, quantization-aware training here is another algorithm than the straight-through
    estimator in high precision."""
    ids, losses, gradients = Language(Size()).sample(16, 0), {}, {}
    # one rounding less: fake quantization rounds the fp32 weight
    arms = {"ours": recipes.qat(weight, compute_dtype=None), "plain": recipes.identity()}
    for name in (*arms, "fake"):
        torch.manual_seed(0)
        model = Model(Size())
        if name == "fake":
            SIMULATIONS[f"fake {weight}"].replace_layers(model)
        else:
            fq.convert(model, arms[name], skip=["head"])
        loss = loss_of(model, ids)
        loss.backward()
        losses[name] = loss.item()
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert abs(losses["ours"] - losses["fake"]) < 1e-5 < abs(losses["plain"] - losses["fake"])
    ours, plain = ((gradients[n] - gradients["fake"]).norm() for n in ("ours", "plain"))
    assert ours < 0.5 * plain, (ours, plain)


def test_weights_are_those_of_the_format_that_was_named():
    """If false, a switch of the weight is lost, or activations have a format that Hopper does not
    multiply by the weight's; or a format that quantizes nothing trains in high precision in
    silence; or a saved state does not say which codes it has."""
    role = fq.Role("linear", "weight")
    nearest, exact = recipes.qat("nvfp4", scale_rule="nearest"), recipes.qat("nvfp4")
    assert exact.hybrid(role).rowwise == Quantizer(fq.format_of("nvfp4", scale_rule="fp8_exact"))
    assert nearest.hybrid(role).rowwise == Quantizer("nvfp4")
    floor = recipes.qat("mxfp4", activations="identity", scale_rounding="floor").hybrid(role)
    assert floor.rowwise == Quantizer(fq.format_of("mxfp4", scale_rounding="floor"))
    assert _recipes_in(f"{exact} | {recipes.mxfp8()}") == [exact, recipes.mxfp8()]
    with hopper.emulated():
        for weight in WEIGHTS:
            plan = build_plan(recipes.qat(weight), "")
            assert plan.slower_products(torch.bfloat16, "sm_90a") == [], weight
    with pytest.raises(ValueError, match="unknown format 'mxfp5'"):
        recipes.qat("mxfp5")
    for weight in ("identity", "fp8_row", 4):
        with pytest.raises(ValueError, match=f"qat: weight={weight!r} .* wanted one of .*mxfp4"):
            recipes.qat(weight)
    with pytest.raises(ValueError, match="scale_rule='fp8_exact' needs a 4-bit format"):
        recipes.qat("mxfp4", scale_rule="fp8_exact")
    with pytest.raises(ValueError, match="square_blocks=True needs"):
        recipes.qat("mxfp4", square_blocks=True)


def test_the_page_runs_as_written(tmp_path, monkeypatch):
    """If false, docs/qat.md shows calls that fail."""
    pytest.importorskip("transformers")
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "qat.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/qat.md", "exec"), {"__name__": "page"})
    assert (tmp_path / "served" / "model.safetensors").exists()
