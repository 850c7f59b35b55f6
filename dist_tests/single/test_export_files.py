# SPDX-License-Identifier: Apache-2.0
"""Folders for inference servers: names of layers, files, and what is refused."""

from __future__ import annotations

import json
import re
import struct

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi.nets import pair_recipe
from dist_tests.single.test_export import (
    K,
    N,
    Net,
    codes,
    converted,
    decompressed,
    of_layer,
    read,
    values,
)
from fsdp_quant.serving import writer

# Names and structure #


def test_a_value_of_any_strides_is_written(tmp_path):
    """If false, a model with a buffer that is one element of a larger one cannot be saved."""
    net = converted("mxfp8")
    net.register_buffer("window", torch.tensor([7.0, 8.0])[::2])
    fq.export(net, tmp_path)
    assert read(tmp_path)[0]["window"].tolist() == [7.0]


def test_a_format_a_layer_makes_groups(tmp_path):
    """If false, a server decodes one layer by the scheme of another."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Net() for _ in range(3))

    net = fq.convert(
        Deep(),
        fq.recipes.per_layer(
            pair_recipe("mxfp8", "mxfp8"),
            {
                "layers.1.*": pair_recipe("nvfp4", "mxfp8"),
                "layers.2.*": pair_recipe("mxfp4", "mxfp8"),
            },
        ),
        skip=["head"],
    )
    fq.export(net, tmp_path)
    tensors, config = read(tmp_path)
    assert config["format"] == "mixed-precision" and config["ignore"] == [
        f"layers.{i}.head" for i in range(3)
    ]
    for i, fmt in enumerate(("mxfp8", "nvfp4", "mxfp4")):
        group = config["config_groups"][f"group_{i}"]
        assert group["targets"] == [f"layers.{i}.up"]
        got = decompressed(of_layer(tensors, f"layers.{i}.up"), config, f"group_{i}")
        laws.assert_same_bytes(got, codes(net.layers[i].up.weight, fmt).dequantize(got.dtype), fmt)
    del net.layers[2]
    with pytest.raises(ValueError, match="layers.0.up and layers.1.up differ"):
        fq.export(net, tmp_path / "x", "modelopt")


def test_fused_modules_keep_the_names_of_the_model(tmp_path):
    """If false, a file has names that no loader of the user's model knows."""

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"dtype": torch.bfloat16, "recipe": fq.recipes.mxfp8()}
            self.mlp = fq.LayerNormMLP(64, 96, bias=False, normalization="RMSNorm", **options)
            self.qkv = fq.LayerNormLinear(64, 96, **options)

    net = torch.compile(Fused())
    fq.export(net, tmp_path, names=lambda name: name.replace("mlp.norm.", "post_norm."))
    tensors, config = read(tmp_path)
    scaled = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "qkv.linear"]
    plain = ["post_norm.weight", "qkv.norm.weight", "qkv.norm.bias", "qkv.linear.bias"]
    assert sorted(tensors) == sorted(
        [*plain, *(f"{n}.{t}" for n in scaled for t in ("weight", "weight_scale"))]
    )
    assert config["ignore"] == []


def test_tied_layers_are_written_once_and_listed(tmp_path):
    """If false, a tied head is quantized by the server, or takes the space of two."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, net = nn.Embedding(8, N, dtype=torch.bfloat16), Net()
            self.up, self.head = net.up, net.head
            self.head.weight = self.embed.weight

    fq.export(fq.convert(Tied(), fq.recipes.mxfp8(), skip=["head"]), tmp_path)
    tensors, config = read(tmp_path)
    assert sorted(tensors) == [
        "embed.weight",
        "up.bias",
        "up.weight",
        "up.weight_scale",
    ] and config["ignore"] == ["head"]


def test_packed_experts_are_written_one_by_one(tmp_path):
    """If false, experts share names, scales or blocks with their neighbours."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = fq.GroupedLinear(
                3, 64, 32, bias=False, packed=True, recipe=fq.recipes.mxfp8(), dtype=torch.bfloat16
            )

    net = Experts()
    fq.export(net, tmp_path)
    tensors, config = read(tmp_path)
    for e in range(3):
        got = decompressed(of_layer(tensors, f"experts.{e}"), config)
        laws.assert_same_bytes(
            got, codes(net.experts.weight[e], "mxfp8").dequantize(got.dtype), f"expert {e}"
        )


def test_codes_at_rest_are_written_as_they_are(tmp_path):
    """If false, quantized parameters, whose master may be gone, or a frozen base are quantized a
    second time, or refused.
    """
    with fq.quantized_model_init(recipe=fq.recipes.fp8_current()):
        net = nn.Sequential(fq.Linear(K, N, dtype=torch.bfloat16))
    optimizer = fq.optim.FusedAdam(net.parameters(), lr=0.1)
    net(values(8).requires_grad_()).sum().backward()
    optimizer.step()
    want = net[0].weight.rowwise
    del optimizer
    fq.export(net, tmp_path / "parameters")
    frozen = converted("nvfp4_16x16").requires_grad_(False)
    before = codes(frozen.up.weight, "nvfp4_16x16")
    fq.freeze(frozen)
    fq.export(frozen, tmp_path / "frozen")
    for folder, layer, storage in (("parameters", "0", want), ("frozen", "up", before)):
        tensors, config = read(tmp_path / folder)
        got = decompressed(of_layer(tensors, layer), config)
        laws.assert_same_bytes(got, storage.dequantize(got.dtype), folder)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(64, 32, bias=False, dtype=torch.bfloat16) for _ in range(3)
        )
        with torch.no_grad():
            for i, layer in enumerate((self.q_proj, self.k_proj, self.v_proj)):
                layer.weight.mul_(1 + i)


def test_merged_layers_get_one_second_level_scale(tmp_path):
    """If false, vLLM decodes k by the global scale of q: it takes the largest of merged layers for
    all.
    """
    net = fq.convert(Attention(), pair_recipe("nvfp4", "nvfp4"))
    with pytest.raises(ValueError, match="q_proj, k_proj, v_proj have tensor scales of their own"):
        fq.export(net, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    fq.export(net, tmp_path / "apart", share_scales=False)
    fq.export(net, tmp_path / "shared", share_scales=True)
    apart, shared = (read(tmp_path / folder) for folder in ("apart", "shared"))
    scales = [shared[0][f"{n}.weight_global_scale"].item() for n in ("q_proj", "k_proj", "v_proj")]
    assert (
        scales
        == [
            min(apart[0][f"{n}.weight_global_scale"].item() for n in ("q_proj", "k_proj", "v_proj"))
        ]
        * 3
    )
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(net, name).weight.detach()
        laws.assert_same_bytes(apart[0][f"{name}.weight_packed"], codes(weight, "nvfp4").data, name)
        error = (
            decompressed(of_layer(shared[0], name), shared[1]).float() - weight.float()
        ).norm() / weight.float().norm()
        assert error < 0.12, (name, error)


# Names that servers merge, by the class whose `packed_modules_mapping`, `stacked_params_mapping`
# (vLLM, SGLang) or `params_map` (TensorRT-LLM) has them; "|" separates groups of one module.
SERVERS_MERGE = {
    "vLLM Qwen3_5Model, linear_attn": "in_proj_qkv in_proj_z | in_proj_b in_proj_a",
    "SGLang Qwen3_5ForCausalLM, linear_attn": "in_proj_qkv in_proj_z | in_proj_b in_proj_a",
    "vLLM Qwen3_5Model, self_attn": "q_proj k_proj v_proj",
    "vLLM BertModel": "query key value",
    "SGLang XLMRobertaBaseModel": "query key value",
    "vLLM DistilBertModel": "q_lin k_lin v_lin",
    "vLLM NomicBertModel": "fc11 fc12",
    "vLLM LlamaForCausalLM, mlp": "gate_proj up_proj",
    "vLLM MixtralForCausalLM, experts": "w1 w3",
    "vLLM QWenLMHeadModel, mlp": "w2 w1",
    "vLLM ExaoneForCausalLM, mlp": "c_fc_0 c_fc_1",
    "vLLM DeepseekV2Model, MLA": "q_a_proj kv_a_proj_with_mqa",
    "vLLM DeepseekV2Model, indexer": "wk weights_proj",
    "vLLM DeepseekV4ForCausalLM, attn": "wq_a wkv",
    "vLLM DeepseekV4ForCausalLM, compressor": "wkv wgate",
    "vLLM KimiLinearModel, KDA": "q_proj k_proj v_proj b_proj f_a_proj",
    "vLLM KimiLinearModel, gated MLA": "q_a_proj kv_a_proj_with_mqa g_proj",
    "vLLM Glm5NextForConditionalGeneration, KDA": "q_proj k_proj v_proj b_proj f_a_proj g_a_proj",
    "vLLM Qwen4ExpForCausalLM": "key_proj value_proj",
    "vLLM WhisperForConditionalGeneration, self_attn": "q_proj k_proj v_proj",
    "vLLM WhisperForConditionalGeneration, encoder_attn": "k_proj v_proj",
    "vLLM-Omni ZImageTransformer2DModel": "to_q to_k to_v | w1 w3",
    "diffusers' added keys": "add_q_proj add_k_proj add_v_proj",
    "TensorRT-LLM DecoderModelForCausalLM": "q_proj k_proj v_proj | gate_proj up_proj",
    "Llama's own names": "wq wk wv | w1 w3",
}


@pytest.mark.parametrize("server", SERVERS_MERGE)
def test_layers_that_servers_merge_share_their_scale_and_format(server, tmp_path):
    """If false, a server decodes a layer by the scale of another, or refuses the file: layers of
    one group have one second-level scale, and one format.
    """
    groups = [of.split() for of in SERVERS_MERGE[server].split("|")]
    parts = [part for group in groups for part in group]
    where = server.rpartition(", ")[2] if server.endswith("_attn") else "block"
    queries = ["q_proj"] if where == "encoder_attn" else []  # which stay apart

    def built(skip: str = "") -> nn.Module:
        block = nn.ModuleDict({n: nn.Linear(64, 32, bias=False) for n in [*queries, *parts]})
        block["other"] = nn.Linear(64, 32, bias=False)
        net = fq.convert(nn.ModuleDict({where: block}), "nvfp4", skip=[f"*.{skip}"] if skip else ())
        with torch.no_grad():
            for i, layer in enumerate(block.values()):
                layer.weight.fill_(1 + i)
        return net

    with pytest.raises(ValueError, match="servers multiply them as one layer"):
        fq.export(built(), tmp_path / "none")
    fq.export(built(), tmp_path / "shared", share_scales=True)
    fq.export(built(), tmp_path / "apart", share_scales=False)
    shared, apart = (
        {n.split(".")[1]: t.item() for n, t in read(tmp_path / folder)[0].items() if "global" in n}
        for folder in ("shared", "apart")
    )
    for group in groups:
        assert {shared[part] for part in group} == {min(apart[part] for part in group)}, group
    for alone in ("other", *queries):
        assert shared[alone] == apart[alone], alone
    assert len(set(apart.values())) == len(apart)
    with pytest.raises(ValueError, match=rf"{where}.{parts[-1]} \(high precision\)"):
        fq.export(built(skip=parts[-1]), tmp_path / "mixed", share_scales=True)


@pytest.mark.parametrize("target", ["compressed-tensors", "fp8", "modelopt"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_row", "fp8_block", "mxfp8", "mxfp4"])
def test_merged_layers_and_experts_have_one_format(recipe, target, tmp_path):
    """If false, a server refuses the file when it starts: not all shards of a merged layer, or of
    the experts that one grouped GEMM multiplies, have a format.
    """
    first = {"q_proj": "q_proj", "k_proj": "q_proj", "v_proj": "q_proj", "experts.0.w2": "experts"}
    for skipped, named in first.items():
        net = nn.Module()
        net.q_proj, net.k_proj, net.v_proj = (nn.Linear(128, 128, bias=False) for _ in range(3))
        net.experts = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(128, 128, bias=False) for n in ("w1", "w2", "w3")})
            for _ in range(2)
        )
        try:
            fq.export(fq.convert(net, recipe), tmp_path / f"{skipped} whole", target)
        except ValueError as error:
            assert "does not hold" in str(error)
            return
        parent, _, name = skipped.rpartition(".")
        net.get_submodule(parent)._modules[name] = nn.Linear(128, 128, bias=False)
        with pytest.raises(ValueError, match=rf"{skipped} \(high precision\).*{named}"):
            fq.export(net, tmp_path / skipped, target)
        assert not (tmp_path / skipped).exists()
        fq.export(net, tmp_path / skipped, target, share_scales=False)


@pytest.mark.parametrize("recipe", ["fp8_tensor", "mxfp8", "nvfp4"])
def test_infinities_are_refused_by_every_writer(recipe, tmp_path):
    """If false, a server computes with finite numbers where this model computes NaN; whatever
    writes names the weight and counts its elements.
    """
    net, frozen = converted(recipe), converted("mxfp8")
    fq.freeze(frozen.requires_grad_(False))
    with torch.no_grad():
        net.up.weight[3, 5], net.up.weight[7, 9] = float("inf"), float("nan")
    writers = [
        lambda **options: fq.export(net, tmp_path / "out", **options),
        lambda **options: fq.refit(net, **options),
        lambda **options: fq.refit(net, sharded=True, **options),
    ]
    for write in writers:
        for format in ("compressed-tensors", "dequantized"):
            with pytest.raises(ValueError, match="^2 elements of up.weight are infinite or NaN"):
                write(format=format, share_scales=False)
    assert not (tmp_path / "out").exists()
    with torch.no_grad():
        net.up.weight[3, 5] = net.up.weight[7, 9] = 0
        net.head.weight[0, 0] = float("-inf")  # high precision: the file shows it
        net.up.bias[1] = 1e5
    fq.export(net, tmp_path / "plain")
    assert read(tmp_path / "plain")[0]["head.weight"][0, 0].item() == float("-inf")
    with pytest.raises(ValueError, match="^1 elements of up.bias are too large for dtype="):
        fq.export(net, tmp_path / "half", dtype=torch.float16)
    frozen.up.weight.rowwise.scale[2, 1] = 255  # NaN
    with pytest.raises(ValueError, match="^32 elements of up.weight are infinite or NaN"):
        fq.export(frozen, tmp_path / "out")


# Files #


def test_shards_hold_what_one_file_does(tmp_path):
    """If false, a large model loses or doubles tensors at the borders of its files."""
    net = converted("nvfp4")
    fq.export(net, tmp_path / "one")
    fq.export(net, tmp_path / "many", max_shard_size="2KB")
    index = json.loads((tmp_path / "many" / writer.INDEX).read_text())
    names = sorted({*index["weight_map"].values()})
    assert len(names) > 1 and names == sorted(
        p.name for p in (tmp_path / "many").glob("*.safetensors")
    )
    found: dict[str, Tensor] = {}
    for name in names:
        assert re.fullmatch(rf"model-\d{{5}}-of-{len(names):05}.safetensors", name)
        of = load_file(tmp_path / "many" / name)
        assert {n for n, file in index["weight_map"].items() if file == name} == set(of)
        found |= of
    want = load_file(tmp_path / "one" / "model.safetensors")
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        laws.assert_same_bytes(found[name], tensor, name)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in want.values())
    assert (
        len(
            {index["weight_map"][f"up.{n}"] for n in of_layer(want)}
            - {index["weight_map"]["up.bias"]}
        )
        == 1
    )


def test_damage_of_an_export_is_found(tmp_path):
    """If false, `fq.checkpoint.verify` calls a damaged export whole, or a whole one damaged."""
    net = converted("nvfp4")
    fq.export(net, tmp_path / "one")
    fq.export(net, tmp_path / "many", max_shard_size=1000)
    for folder in (tmp_path / "one", tmp_path / "one" / "model.safetensors", tmp_path / "many"):
        assert not fq.checkpoint.verify(folder).problems
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    for name, tensor in tensors.items():
        file = tmp_path / "one" / "model.safetensors"
        whole = file.read_bytes()
        at = whole.rindex(tensor.flatten().view(torch.uint8).numpy().tobytes()[:64])
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        for path in (file, file.parent):
            (problem,) = fq.checkpoint.verify(path).problems
            assert "holds other bytes" in problem and name in problem
        file.write_bytes(whole)
    first = sorted((tmp_path / "many").glob("*.safetensors"))[0]
    first.unlink()
    (problem,) = fq.checkpoint.verify(tmp_path / "many").problems
    assert f"lacks {first.name}" in problem


def test_every_tensor_is_aligned_to_its_elements(tmp_path):
    """If false, readers that map a file see fp32 scales at odd addresses."""
    net = converted("fp8_row", Net(rows=9, cols=15))
    fq.export(net, tmp_path, dtype=torch.float32)
    data = (tmp_path / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0 and len(header) == 5
    for name, of in header.items():
        if name != "__metadata__":
            assert of["data_offsets"][0] % {"F32": 4, "BF16": 2, "F8_E4M3": 1}[of["dtype"]] == 0, (
                name
            )


@pytest.mark.parametrize("fails", ["write", "finish"])
def test_a_failure_leaves_nothing(fails, tmp_path, monkeypatch):
    """If false, a full disk leaves half a file under a name that readers trust."""

    def full(*_):
        raise OSError("no space left on device")

    (
        monkeypatch.setattr(writer.Writer, "write", full)
        if fails == "write"
        else monkeypatch.setattr(writer, "sync", full)
    )
    with pytest.raises(OSError, match="no space left"):
        fq.export(converted("mxfp8"), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_what_a_server_does_not_hold_is_refused_before_anything_is_written(tmp_path):
    """If false, a user finds out when the server starts, or never."""
    e5m2 = fq.format_of("mxfp8", element="e5m2")
    out, net = tmp_path / "out", converted("mxfp8")
    refusals = [
        (
            converted("mxfp6"),
            {},
            r"up.weight is mxfp6 in the forward, which format='compressed-tensors' does not hold; "
            r"it holds",
        ),
        (converted("fp8_1x128"), {}, "which format='compressed-tensors' does not hold"),
        (fq.convert(Net(), pair_recipe(e5m2, e5m2), skip=["head"]), {}, "does not hold"),
        (converted("mxfp4"), {"format": "modelopt"}, "which format='modelopt' does not hold"),
        (converted("fp8_tensor"), {"format": "fp8"}, "which format='fp8' does not hold"),
        (converted("fp8_128x128"), {"format": "modelopt"}, r"multiples of \[128, 128\]"),
        (
            converted("mxfp8", Net(cols=48)),
            {},
            r"up.weight is \[144, 48\], and servers read mxfp8 of multiples of \[1, 32\]",
        ),
        (Net(), {}, "found no quantized layer"),
        (net, {"format": "gguf"}, "format must be one of"),
        (net, {"dtype": torch.int8}, "dtype must be one of .*got torch.int8"),
        (net, {"dtype": "bf16"}, "dtype must be one of .*got 'bf16'"),
        (net, {"share_scales": 1}, "share_scales must be one of .*got 1"),
        (net, {"input_amax": ["up"]}, "input_amax must be numbers by layer"),
        (net, {"names": "up"}, "names must be a function"),
        (net, {"max_shard_size": "5 parsecs"}, "max_shard_size must be"),
        (net, {"names": lambda name: "same.weight"}, "two weights are named same.weight"),
    ]
    for model, options, message in refusals:
        with pytest.raises(ValueError, match=message):
            fq.export(model, out, **options)
        assert not out.exists(), message
    out.mkdir()
    (out / ".model.safetensors.partial").touch()  # of a process that was killed
    fq.export(net, out)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(ValueError, match="holds model.safetensors"):
        fq.export(net, out)
