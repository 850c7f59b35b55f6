# SPDX-License-Identifier: Apache-2.0
"""`transformers` loads exported folders, and our reader loads them and those of other producers."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.single.test_export import HELD, K, N, Net, codes, converted
from fsdp_quant.formats import ROWWISE
from fsdp_quant.ops import reference
from fsdp_quant.serving.layouts import read_storage

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(12)[None]
RECIPES = {
    "fp8_current": fq.recipes.fp8_current(),
    "fp8_row": fq.recipes.fp8_row(),
    "fp8_block": fq.recipes.fp8_block(),
    "mxfp8": fq.recipes.mxfp8(),
    "mxfp4": fq.recipes.mxfp4(),
    "nvfp4": fq.recipes.nvfp4(),
}


def llama(seed: int = 0) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=seed == 2,
    )
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def decoded(model: nn.Module) -> nn.Module:
    """The plain model, whose weights are the values of the codes that `model` multiplies."""
    plain = llama()
    state = {n: t.detach() for n, t in model.state_dict().items()}
    for name, layer in model.named_modules():
        if isinstance(layer, fq.Linear):
            fmt = layer.plan.weight.rowwise
            state[f"{name}.weight"] = fmt.storage(layer.weight.detach(), ROWWISE).dequantize(
                torch.bfloat16
            )
    plain.load_state_dict(state)
    return plain


def loaded(folder: Path, **options) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, **options
    )


def with_scales_of_powers_of_two(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.clamp_(-0.25, 0.25)[0, 0] = 0.328125  # 2688 / 8192
    return model


@pytest.mark.parametrize("name", RECIPES)
def test_transformers_computes_our_logits(name, tmp_path):
    """If false, a folder loads, and is another model."""
    model = fq.convert(with_scales_of_powers_of_two(llama()), RECIPES[name], skip=["lm_head"])
    want = decoded(model)
    dequantize = transformers.CompressedTensorsConfig(dequantize=True)
    for target in ("compressed-tensors", "dequantized", "fp8"):
        if target == "fp8" and name not in ("fp8_block", "mxfp8"):
            continue
        fq.export(model, tmp_path / target, target)
        got = loaded(
            tmp_path / target,
            **({"quantization_config": dequantize} if target == "compressed-tensors" else {}),
        )
        for weight, tensor in want.state_dict().items():
            laws.assert_same_bytes(got.state_dict()[weight], tensor, f"{target}: {weight}")
        with torch.no_grad():
            laws.assert_same_bytes(got(TOKENS).logits, want(TOKENS).logits, target)
        assert got.config.architectures == ["LlamaForCausalLM"] and got.dtype is torch.bfloat16


@pytest.mark.parametrize("name", RECIPES)
def test_compressed_models_quantize_inputs_as_training_does(name, tmp_path):
    """If false, the scheme of a file quantizes inputs in other blocks, or not at all."""
    model = llama()
    with torch.no_grad():
        exact = model(TOKENS).logits
        fq.convert(model, RECIPES[name], skip=["lm_head"])
        fq.export(model, tmp_path, share_scales=True)
        both = model, loaded(tmp_path)
        errors = [(m(TOKENS).logits - exact).norm() / exact.norm() for m in both]
    low, high = (0.6, 0.95) if name == "nvfp4" else (0.85, 1.15)  # nvfp4: without an input_amax
    assert low < errors[1] / errors[0] < high, errors


def test_transformers_keeps_compressed_weights(tmp_path):
    """If false, transformers cannot lay the compressed modules out before it loads them."""
    model = fq.convert(llama(2), fq.recipes.mxfp4(), skip=["lm_head"])
    fq.export(model, tmp_path, max_shard_size="40KB")
    got = loaded(tmp_path)
    layer = got.model.layers[0].mlp.down_proj
    storage = codes(model.model.layers[0].mlp.down_proj.weight, "mxfp4")
    laws.assert_same_bytes(layer.weight_packed.detach(), storage.data, "weight_packed")
    laws.assert_same_bytes(layer.weight_scale.detach(), storage.scale, "weight_scale")
    assert got.lm_head.weight is got.model.embed_tokens.weight


@pytest.mark.parametrize(
    "recipe, target", [("fp8_row", "compressed-tensors"), ("fp8_block", "fp8"), ("mxfp8", "fp8")]
)
def test_experts_have_the_names_that_transformers_merges(recipe, target, tmp_path):
    """If false, gate and up of an expert are exchanged, or a server finds no experts."""
    sizes = dict(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = transformers.MixtralConfig(
        **sizes, vocab_size=64, num_local_experts=3, num_experts_per_tok=2
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).bfloat16()
    fq.convert(model, RECIPES[recipe], skip=["lm_head"])
    fq.export(model, tmp_path, target)
    tensors, experts = load_file(tmp_path / "model.safetensors"), model.model.layers[0].mlp.experts
    streamed = dict(tensor for bucket in fq.refit(model, target) for tensor in bucket)
    assert streamed.keys() == tensors.keys()
    for name, tensor in streamed.items():
        laws.assert_same_bytes(tensor, tensors[name], name)
    scale = "weight_scale" if target == "compressed-tensors" else "weight_scale_inv"
    for e in range(3):
        whole = experts.gate_up_proj_product.layers[e].plan.weight.rowwise.storage(
            experts.gate_up_proj[e].detach(), ROWWISE
        )
        for part, rows in (("w1", slice(0, 128)), ("w3", slice(128, 256))):
            name = f"model.layers.0.block_sparse_moe.experts.{e}.{part}."
            storage = whole.narrow(rows.start, 128)
            laws.assert_same_bytes(tensors[f"{name}weight"].view(torch.uint8), storage.data, name)
            laws.assert_same_bytes(tensors[f"{name}{scale}"], storage.scale, f"{name}{scale}")
    options = (
        {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
        if target != "fp8"
        else {}
    )
    got, read = loaded(tmp_path, **options), transformers.MixtralForCausalLM(config).bfloat16()
    fq.from_pretrained_quantized(read, tmp_path)
    for name, tensor in got.state_dict().items():
        laws.assert_same_bytes(read.state_dict()[name], tensor, name)


def test_packed_experts_and_scalars_are_saved_as_transformers_saves_them(tmp_path):
    """If false, GraniteMoE loads random experts from its export, or CLIP, whose temperature is a
    scalar, has no export."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    granite = transformers.GraniteMoeForCausalLM(
        transformers.GraniteMoeConfig(
            **sizes, num_key_value_heads=2, vocab_size=8, num_local_experts=3, num_experts_per_tok=2
        )
    )
    vision = dict(**sizes, image_size=4, patch_size=2)
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=dict(**sizes, vocab_size=8), vision_config=vision)
    )
    for made, extent in ((granite, (3, 64, 32)), (clip, ())):
        model, folder = fq.convert(made.bfloat16(), fq.recipes.fp8_row()), tmp_path / str(extent)
        fq.export(model, folder / "values", "dequantized")
        got, told = type(made).from_pretrained(
            folder / "values", dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(told.values()), told
        assert extent in {
            tuple(t.shape) for t in load_file(folder / "values/model.safetensors").values()
        }
        for target in ("values", "codes"):
            if target == "codes":
                fq.export(model, folder / target)
            read = fq.from_pretrained_quantized(copy.deepcopy(got), folder / target)
            for name, tensor in got.state_dict().items():
                laws.assert_same_bytes(read.state_dict()[name], tensor, f"{target}: {name}")


# Reading #


@pytest.mark.parametrize("target", ["compressed-tensors", "modelopt", "fp8"])
@pytest.mark.parametrize(
    "fmt", ["fp8_tensor", "fp8_row", "fp8_128x128", "mxfp8_32x32", "mxfp4", "nvfp4", "nvfp4_16x16"]
)
def test_frozen_codes_are_those_that_were_exported(fmt, target, tmp_path):
    """If false, a base under LoRA, or a rollout, multiplies other codes than the server that has
    the same file.
    """
    first = converted(fmt, Net(rows=128))
    with torch.no_grad():
        first.up.weight.mul_(0.37)
    try:
        fq.export(first, tmp_path, target)
    except ValueError as error:
        assert "does not hold" in str(error)
        return
    want, x = codes(first.up.weight, fmt), laws.values(8, K, dtype=torch.bfloat16)
    masters = converted(fmt, Net(rows=128)).float()
    fq.from_pretrained_quantized(masters, tmp_path)
    laws.assert_same_bytes(masters.up.weight.detach(), want.dequantize(torch.float32), "master")
    second = converted(fmt, Net(rows=128))
    for p in second.parameters():
        p.data.zero_()
    assert fq.from_pretrained_quantized(second, tmp_path, frozen=True) is second
    got = second.up.weight.rowwise
    laws.assert_same_bytes(got.data, want.data, "data")
    laws.assert_same_bytes(got.scale, want.scale, "scale")
    laws.assert_same_bytes(got.dequantize(torch.float32), want.dequantize(torch.float32), "values")
    assert type(second.up.weight) is fq.QuantizedTensor and not second.up.weight.requires_grad
    with torch.no_grad():
        laws.assert_same_bytes(second(x), first(x), "output")
    leaf = x.clone().requires_grad_()
    second(leaf).sum().backward()
    assert leaf.grad.isfinite().all() and leaf.grad.any()
    fq.export(second, tmp_path / "again", target)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        laws.assert_same_bytes(
            load_file(tmp_path / "again" / "model.safetensors")[name], tensor, name
        )


def test_experts_keep_the_codes_of_tensors_that_are_their_rows(tmp_path):
    """If false, a frozen Mixtral multiplies other experts than its file has, or takes the scale of
    one tensor for that of another."""
    config = transformers.MixtralConfig(
        **dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
        **dict(num_key_value_heads=2, vocab_size=8, num_local_experts=3, num_experts_per_tok=2),
    )
    for name in ("mxfp8", "nvfp4"):
        first, second = (
            fq.convert(transformers.MixtralForCausalLM(config).bfloat16(), name, skip=["lm_head"])
            for _ in range(2)
        )
        fq.export(first.requires_grad_(False), tmp_path / name, share_scales=False)
        if name == "nvfp4":
            tensors = load_file(tmp_path / name / "model.safetensors")
            changed = next(n for n in tensors if n.endswith("experts.1.w3.weight_global_scale"))
            (tmp_path / "other").mkdir()
            other = tensors | {changed: tensors[changed] * 2}
            save_file(other, tmp_path / "other" / "model.safetensors")
            with pytest.raises(ValueError, match="gate_up_proj is 2 tensors .*frozen=False, then"):
                fq.from_pretrained_quantized(second, tmp_path / "other", frozen=True)
            assert not any(isinstance(p, fq.QuantizedTensor) for p in second.parameters())
        fq.from_pretrained_quantized(second, tmp_path / name, frozen=True)
        fq.freeze(first)
        for (label, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
            if isinstance(p, fq.QuantizedTensor):
                for a, b in zip(p._memory(), q._memory(), strict=True):
                    if a.dtype is torch.uint8:  # second-level scales may be off by an ulp
                        laws.assert_same_bytes(b, a, label)
        got, want = (model(TOKENS % 8).logits for model in (second, first))
        torch.testing.assert_close(got, want)


def test_deepseeks_checkpoints_are_read(tmp_path):
    """If false, scales that are no powers of two, as DeepSeek-V3 has them, are lost, or taken for a
    row's.
    """
    element = laws.values(200, K, dtype=torch.float32).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.5
    save_file(
        {
            "up.weight": element,
            "up.weight_scale_inv": scale,
            "up.bias": torch.ones(200),
            "head.weight": torch.ones(8, 200),
        },
        tmp_path / "model.safetensors",
    )
    net = fq.from_pretrained_quantized(Net(rows=200, dtype=torch.float32), tmp_path)
    want = element.float() * scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    laws.assert_same_bytes(net.up.weight.detach(), want, "weight")
    with pytest.raises(ValueError, match="scales in the file that .*pow2.* of the recipe excludes"):
        fq.from_pretrained_quantized(converted("fp8_128x128", Net(rows=200)), tmp_path, frozen=True)
    with pytest.raises(ValueError, match="frozen=True found no quantized layer; call fq.convert"):
        fq.from_pretrained_quantized(Net(rows=200), tmp_path, frozen=True)
    net = fq.convert(Net(rows=200), fq.recipes.fp8_block(pow2=False), skip=["head"])
    fq.from_pretrained_quantized(net, tmp_path, frozen=True)
    for frozen in (True, False):
        with pytest.raises(ValueError, match="up.weight is frozen already.*unfreeze.* converted"):
            fq.from_pretrained_quantized(net, tmp_path, frozen=frozen)
    fq.unfreeze(net)
    fq.from_pretrained_quantized(net, tmp_path, frozen=True)
    assert isinstance(net.up.weight, fq.QuantizedTensor)


def test_gpt_oss_checkpoints_are_read(tmp_path):
    """If false, experts of gpt-oss are transposed, or their nibbles exchanged; compared with
    transformers' own conversion.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    model = transformers.GptOssForCausalLM(config).bfloat16()
    state, want = dict(model.state_dict()), {}
    for part, rows, groups in (("gate_up_proj", 192, 2), ("down_proj", 64, 3)):
        name = f"model.layers.0.mlp.experts.{part}"
        del state[name]
        state[f"{name}_blocks"] = torch.randint(0, 256, (3, rows, groups, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(115, 130, (3, rows, groups), dtype=torch.uint8)
        want[name] = convert_moe_packed_tensors(state[f"{name}_blocks"], state[f"{name}_scales"])
    save_file(
        {n: t.detach().contiguous() for n, t in state.items()}, tmp_path / "model.safetensors"
    )
    fq.from_pretrained_quantized(model, tmp_path)
    for name, tensor in want.items():
        laws.assert_same_bytes(model.state_dict()[name], tensor.contiguous(), name)
    skip = ["*self_attn*", "*router*", "lm_head"]
    frozen = fq.convert(copy.deepcopy(model), "mxfp4", skip=skip)
    fq.from_pretrained_quantized(frozen, tmp_path, frozen=True)
    for name, tensor in want.items():
        codes = frozen.get_parameter(name)
        assert type(codes) is fq.QuantizedTensor and not codes.requires_grad
        laws.assert_same_bytes(codes.dequantize().mT, tensor, name)
        for e, matrix in enumerate(codes.unbind()):
            blocks, scales = (state[f"{name}_{part}"][e] for part in ("blocks", "scales"))
            laws.assert_same_bytes(matrix.rowwise.data, blocks.flatten(1), f"{name} {e}: codes")
            laws.assert_same_bytes(matrix.rowwise.scale, scales, f"{name} {e}: scales")
    x = frozen.model.embed_tokens(torch.arange(8)[None]).detach().requires_grad_()
    frozen(inputs_embeds=x).logits.float().sum().backward()
    assert x.grad.isfinite().all()
    fq.export(frozen, tmp_path / "again", "dequantized")
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, tensor in want.items():
        laws.assert_same_bytes(again[name], tensor.contiguous(), f"{name}: exported")
    with pytest.raises(ValueError, match="gate_up_proj is mxfp4 in the files.* multiplies mxfp8"):
        other = fq.convert(copy.deepcopy(model), "mxfp8", skip=skip)
        fq.from_pretrained_quantized(other, tmp_path, frozen=True)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    for change in (lambda t: t.mT, lambda t: t.flatten(1), lambda t: t.float(), lambda t: t | 255):
        save_file(state | {name: change(state[name]).contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="down_proj.*scales"):
            fq.from_pretrained_quantized(model, tmp_path)


def test_a_checkpoint_that_does_not_fit_is_refused_whole(tmp_path):
    """If false, a model is left half loaded, or a weight keeps its random values in silence."""
    fq.export(converted("mxfp8"), tmp_path / "good")
    tensors = load_file(tmp_path / "good" / "model.safetensors")

    def stored(name: str, changed: dict[str, Tensor | None]) -> Path:
        (tmp_path / name).mkdir()
        save_file(
            {n: t for n, t in (tensors | changed).items() if t is not None},
            tmp_path / name / "model.safetensors",
        )
        return tmp_path / name

    fresh = Net()
    before = {n: t.clone() for n, t in fresh.state_dict().items()}
    refusals = [
        (
            fresh,
            stored("missing", {"head.weight": None}),
            {},
            "1 are not in the files, such as head.weight",
        ),
        (
            fresh,
            stored("extra", {"tail.weight": torch.ones(1)}),
            {},
            "1 are of no parameter, such as tail.weight",
        ),
        (
            converted("nvfp4"),
            tmp_path / "good",
            {"frozen": True},
            r"up.weight is mxfp8 in the file and nvfp4 in the recipe",
        ),
        (
            fq.convert(Net(), fq.recipes.mxfp8()),
            tmp_path / "good",
            {"frozen": True},
            "head.weight is high precision in the files; name it in fq.convert's skip=",
        ),
        (
            converted("mxfp8_32x32"),
            tmp_path / "good",
            {"frozen": True},
            "a scale per row in the file",
        ),
        (fresh, tmp_path, {}, "neither model.safetensors nor .* wanted a folder on a disk"),
        (fresh, tmp_path / "good", {"frozen": "yes"}, "frozen must be True or False, got 'yes'"),
    ]
    for model, path, options, message in refusals:
        with pytest.raises(ValueError, match=message):
            fq.from_pretrained_quantized(model, path, **options)
    for name, tensor in before.items():
        laws.assert_same_bytes(fresh.state_dict()[name], tensor, name)
    fq.from_pretrained_quantized(fresh, tmp_path / "extra", strict=False)
    laws.assert_same_bytes(
        fresh.up.weight.detach(),
        codes(converted("mxfp8").up.weight, "mxfp8").dequantize(torch.bfloat16),
        "up",
    )
    alone = stored("alone", {"up.weight_scale": None})
    with pytest.raises(
        ValueError, match="up.weight is torch.float8_e4m3fn in the file, without scales"
    ):
        fq.from_pretrained_quantized(Net(), alone)
    integers = stored("integers", {"up.weight": torch.zeros(N, K // 8, dtype=torch.int32)})
    with pytest.raises(ValueError, match="no format that this reads"):
        fq.from_pretrained_quantized(Net(), integers)


LAYOUTS = {  # of scales, as other writers or a server may have them
    "transposed": lambda t: t.flatten(1).t().contiguous(),
    "flat": lambda t: t.flatten(),
    "padded": lambda t: torch.cat([t.flatten(1), t.flatten(1)], 1),
    "a dimension more": lambda t: t[None],
    "integers": lambda t: t.float().to(torch.int32),
    "float64": lambda t: t.double(),
}
EXCLUDED = {  # values of scales, by their dtype
    torch.uint8: [255],
    torch.float8_e4m3fn: [-1.0, float("nan")],
    torch.float32: [-1.0, 0.0, float("nan"), float("inf")],
}


@pytest.mark.parametrize("target", ["compressed-tensors", "modelopt", "fp8"])
@pytest.mark.parametrize("fmt", HELD)
def test_scales_of_another_layout_are_refused_by_name(fmt, target, tmp_path):
    """If false, a model trains on from other weights in silence: shape, dtype, sign and range of
    scales are facts of a format. Nothing of the model is changed.
    """
    try:
        fq.export(converted(fmt, Net(rows=128, cols=384)), tmp_path, target)
    except ValueError as error:
        assert "does not hold" in str(error)
        return
    file, net = tmp_path / "model.safetensors", Net(rows=128, cols=384)
    tensors, before = load_file(file), {n: t.clone() for n, t in net.state_dict().items()}

    def refused(changed: dict[str, Tensor], part: str, strict: bool = True) -> None:
        save_file(tensors | changed, file)
        with pytest.raises(ValueError, match=rf"up.*{part}"):
            fq.from_pretrained_quantized(net, tmp_path, strict=strict)
            pytest.fail(f"{fmt} {target}: {part} was read")
        for key, value in before.items():
            laws.assert_same_bytes(net.state_dict()[key], value, f"{part} {key}")

    scales = {n: t for n, t in tensors.items() if "scale" in n}
    assert len(scales) == 1 + fmt.startswith("nvfp4")
    for name, scale in scales.items():
        part = name.rpartition(".")[2]
        for layout, change in LAYOUTS.items():
            if scale.numel() > 1 or layout in ("integers", "float64"):
                if (layout, scale.dim()) not in (("flat", 1), ("transposed", 1), ("padded", 1)):
                    other = change(scale)
                    is_channel = fmt == "fp8_row" and other.shape == (128,)
                    if not is_channel:  # [N] and [N, 1] are both in use
                        refused({name: other}, part)
        for value in EXCLUDED[scale.dtype]:
            other = scale.clone().float()
            other.view(-1)[-1] = value
            refused({name: other.to(scale.dtype)}, part)
    kept = "weight_packed" if "up.weight_packed" in tensors else "weight"
    doubled = "weight_scale" if "up.weight_scale_inv" in tensors else "weight_scale_inv"
    refused({"up.weight_zero_point": torch.zeros(1)}, "weight_zero_point", strict=False)
    refused({f"up.{doubled}": torch.ones(1)}, doubled, strict=False)
    swapped = {"weight": "weight_packed", "weight_packed": "weight"}[kept]
    refused({f"up.{swapped}": tensors[f"up.{kept}"].clone()}, swapped, strict=False)
    refused({f"up.{kept}": tensors[f"up.{kept}"].t().contiguous()}, "weight", strict=False)
    if len(scales) == 1:
        refused({"up.weight_scale_2": torch.ones(())}, "weight_scale_2", strict=False)


def test_quantized_parameters_take_loaded_values(tmp_path):
    """If false, the codes of a quantized parameter are those of the values before the load."""
    fq.export(converted("mxfp8"), tmp_path)
    with fq.quantized_model_init(recipe=fq.recipes.mxfp8()):
        net = Net()
        net.up = fq.Linear(K, N, dtype=torch.bfloat16)
    net.up.weight.rowwise
    fq.from_pretrained_quantized(net, tmp_path)
    want = codes(converted("mxfp8").up.weight, "mxfp8").dequantize(torch.bfloat16)
    laws.assert_same_bytes(net.up.weight.rowwise.data, codes(want, "mxfp8").data, "codes")
    with pytest.raises(ValueError, match="up.weight is a quantized parameter"):
        fq.from_pretrained_quantized(net, tmp_path, frozen=True)


def test_adapters_are_not_left_out_in_silence(tmp_path):
    """If false, a server loads a base without what was trained."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(converted("mxfp8"), peft.LoraConfig(target_modules=["up"]))
    for part in (model, model.get_base_model()):
        with pytest.raises(ValueError, match="the model has adapters"):
            fq.export(part, tmp_path)


def test_the_page_runs_as_written(tmp_path, monkeypatch):
    """If false, docs/export.md shows calls that fail."""
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, scope)


def test_a_second_level_keeps_its_decode_scale():
    """If false, nvfp4 values drift by an ulp with each round trip through files that hold the
    inverse of the amax.
    """
    for amax in (laws.values(64, 1, dtype=torch.float32).abs().flatten() + 1e-3).tolist():
        for fmt in (fq.format_of("nvfp4"), fq.format_of("nvfp4", scale_rule="fp8_exact")):
            S = reference.tensor_encode_scale(torch.tensor([amax]), fmt)
            tensors = {
                "weight_packed": torch.zeros(2, 8, dtype=torch.uint8),
                "weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn),
                "weight_global_scale": S,
            }
            read = read_storage("w", tensors, torch.float32, "cpu", fmt)
            laws.assert_same_bytes(
                reference.tensor_decode_scale(read.tensor_amax, fmt),
                reference.tensor_decode_scale(torch.tensor([amax]), fmt),
                "D",
            )
