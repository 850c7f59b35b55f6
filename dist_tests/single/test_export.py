"""Files for inference servers: every weight is decoded by the servers' own libraries, or by a formula written out here."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi.nets import pair_recipe
from fsdp_quant.formats import ROWWISE
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.serving import writer
from fsdp_quant.storage import Storage

N, K = 144, 256
HELD = ["fp8_tensor", "fp8_row", "fp8_128x128", "mxfp8", "mxfp8_32x32", "mxfp4", "nvfp4", "nvfp4_16x16"]


def values(rows: int = N, cols: int = K, seed: int = 0) -> Tensor:
    """bf16 whose amax, 2688 / 1024, has a power of two as second-level scale: a server's order of products rounds alike."""
    x = laws.values(rows, cols, seed=seed, dtype=torch.bfloat16).clamp(-2, 2)
    x[0, 0] = 2.625
    return x


class Net(nn.Module):
    """Two layers, one of which a test leaves high precision."""

    def __init__(self, rows: int = N, cols: int = K, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.up, self.head = nn.Linear(cols, rows, dtype=dtype), nn.Linear(rows, 8, bias=False, dtype=dtype)
        with torch.no_grad():
            self.up.weight.copy_(values(rows, cols))

    def forward(self, x):
        return self.head(self.up(x))


def converted(rowwise: str, net: Net | None = None, columnwise: str | None = None) -> Net:
    recipe = pair_recipe(rowwise, columnwise or rowwise)
    return fq.convert(net or Net(), recipe, skip=["head"])


def codes(weight: Tensor, fmt: str) -> Storage:
    return Quantizer(fmt).storage(weight.detach().bfloat16(), ROWWISE)


def read(folder: Path) -> tuple[dict[str, Tensor], dict]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())["quantization_config"]


def of_layer(tensors: dict[str, Tensor], layer: str = "up") -> dict[str, Tensor]:
    return {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == layer}


def decompressed(tensors: dict[str, Tensor], config: dict, group: str = "group_0") -> Tensor:
    """What the compressed-tensors library makes of a layer, by the scheme that the configuration gives it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = QuantizationConfig.model_validate(config).config_groups[group]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(tensors, scheme)["weight"]


@pytest.mark.parametrize("fmt", HELD)
def test_compressed_tensors_decodes_our_values(fmt, tmp_path):
    """If false, vLLM multiplies other weights than training did: a name, a shape, a convention or the nibble order is wrong."""
    net = converted(fmt)
    fq.export(net, tmp_path)
    tensors, config = read(tmp_path)
    want = codes(net.up.weight, fmt)
    got = decompressed(of_layer(tensors), config)
    laws.assert_same_bytes(got, want.dequantize(got.dtype), fmt)
    assert config["ignore"] == ["head"] and tensors["head.weight"].dtype is torch.bfloat16
    laws.assert_same_bytes(tensors["up.bias"], net.up.bias.detach(), "bias")


def test_nvfp4_of_any_amax_decodes_within_an_ulp(tmp_path):
    """If false, the global scale is no encode scale, or not that of this tensor. The library divides where we multiply."""
    net = converted("nvfp4")
    with torch.no_grad():
        net.up.weight.mul_(0.37)
    fq.export(net, tmp_path)
    got, want = decompressed(of_layer((of := read(tmp_path))[0]), of[1]), codes(net.up.weight, "nvfp4").dequantize(torch.bfloat16)
    apart = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3


MODELOPT = {
    "fp8_tensor": ("FP8_PER_CHANNEL_PER_TOKEN", [N]), "fp8_row": ("FP8_PER_CHANNEL_PER_TOKEN", [N]),
    "fp8_128x128": ("FP8_PB_WO", [2, 1, 2, 1]), "mxfp8": ("MXFP8", [N, K // 32]), "nvfp4": ("W4A16_NVFP4", [N, K // 16]),
}


@pytest.mark.parametrize("fmt", MODELOPT)
def test_modelopt_files_decode_to_our_values(fmt, tmp_path):
    """If false, vLLM's and SGLang's modelopt loaders read other weights: shapes and algorithms are those that they register."""
    net = converted(fmt, Net(rows=256) if fmt == "fp8_128x128" else Net())
    fq.export(net, tmp_path, "modelopt")
    tensors, config = read(tmp_path)
    algorithm, shape = MODELOPT[fmt]
    assert config["quant_method"] == "modelopt" and config["quant_algo"] == algorithm and config["ignore"] == ["head"]
    beside = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert beside["quantization"]["quant_algo"] == algorithm and beside["quantization"]["exclude_modules"] == ["head"]
    up, want = of_layer(tensors), codes(net.up.weight, fmt)
    assert list(up["weight_scale"].shape) == shape
    if fmt == "nvfp4":
        assert up["weight"].dtype is torch.uint8 and up["weight_scale_2"].shape == ()
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = torch.cat([table, -table])
        element = table[torch.stack([up["weight"] & 15, up["weight"] >> 4], -1).flatten(1).int()]
        got = element * up["weight_scale"].float().repeat_interleave(16, 1) * up["weight_scale_2"]
    elif fmt == "mxfp8":
        got = up["weight"].float() * (2.0 ** (up["weight_scale"].float() - 127)).repeat_interleave(32, 1)
    elif fmt == "fp8_128x128":
        got = up["weight"].float() * up["weight_scale"][:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        got = up["weight"].float() * up["weight_scale"][:, None]
    laws.assert_same_bytes(got, want.dequantize(torch.float32), fmt)


def test_modelopt_nvfp4_is_what_the_converter_to_compressed_tensors_takes(tmp_path):
    """If false, weight_scale_2 or input_scale is not the inverse of what compressed-tensors stores."""
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    net = converted("nvfp4_16x16")
    for target in ("modelopt", "compressed-tensors"):
        fq.export(net, tmp_path / target, target, input_amax={"up": 2688 / 2**9})
    got = ModelOptNvfp4Converter(ignore=["head"], targets=["re:.*up"]).process(dict(read(tmp_path / "modelopt")[0]))
    want, config = read(tmp_path / "compressed-tensors")
    for name in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"):
        laws.assert_same_bytes(got[f"up.{name}"].reshape(want[f"up.{name}"].shape), want[f"up.{name}"], name)
    assert want["up.weight_global_scale"].item() == 1024 and want["up.input_global_scale"].item() == 512
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    assert read(tmp_path / "modelopt")[1]["quant_algo"] == "NVFP4"


def test_deepseeks_layout_is_what_its_dequantizer_reads(tmp_path):
    """If false, weight_scale_inv is no decode scale, or blocks at the edge are lost."""
    from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer

    net = converted("fp8_128x128", Net(rows=200))
    fq.export(net, tmp_path, "fp8")
    tensors, config = read(tmp_path)
    assert config["weight_block_size"] == [128, 128] and config["modules_to_not_convert"] == config["ignored_layers"] == ["head"]
    got = FP8BlockDequantizer(targets=["re:.*up"], dtype=torch.bfloat16).process(dict(tensors))["up.weight"]
    laws.assert_same_bytes(got, codes(net.up.weight, "fp8_128x128").dequantize(torch.bfloat16), "weight")


def test_static_scales_of_inputs_are_those_of_the_amax(tmp_path):
    """If false, a server quantizes inputs with another scale than it was given."""
    for target, algorithm in (("compressed-tensors", None), ("modelopt", "FP8")):
        fq.export(converted("fp8_tensor"), tmp_path / target, target, input_amax={"up": 224.0})
        tensors, config = read(tmp_path / target)
        assert tensors["up.input_scale"].item() == 0.5 and config.get("quant_algo") == algorithm
        assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] is False
        assert tensors["up.weight_scale"].numel() == 1
    with pytest.raises(ValueError, match="input_amax names other"):
        fq.export(converted("fp8_tensor"), tmp_path / "x", input_amax={"other": 1.0})
    with pytest.raises(ValueError, match="must scale a whole tensor of inputs"):
        fq.export(converted("mxfp8"), tmp_path / "x", input_amax={"up": 1.0})


def test_inputs_that_training_kept_in_high_precision_stay_so(tmp_path):
    """If false, a server quantizes what the training forward did not."""
    for name, recipe, dynamic in (("w", fq.CustomRecipe(_weights_alone), None), ("wi", pair_recipe("mxfp8", "mxfp8"), True)):
        fq.export(fq.convert(Net(), recipe, skip=["head"]), tmp_path / name)
        inputs = read(tmp_path / name)[1]["config_groups"]["group_0"]["input_activations"]
        assert (inputs and inputs["dynamic"]) == dynamic, name


def _weights_alone(role: fq.Role):
    return "mxfp8" if role.tensor_type == "weight" else "identity"


# Names and structure #

def test_a_format_a_layer_makes_groups(tmp_path):
    """If false, a server decodes one layer by the scheme of another."""
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Net() for _ in range(3))

    net = fq.convert(Deep(), fq.recipes.per_layer(
        pair_recipe("mxfp8", "mxfp8"), {"layers.1.*": pair_recipe("nvfp4", "mxfp8"), "layers.2.*": pair_recipe("mxfp4", "mxfp8")}
    ), skip=["head"])
    fq.export(net, tmp_path)
    tensors, config = read(tmp_path)
    assert config["format"] == "mixed-precision" and config["ignore"] == [f"layers.{i}.head" for i in range(3)]
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
            self.mlp = fq.LayerNormMLP(64, 96, dtype=torch.bfloat16, recipe=fq.recipes.mxfp8())
            self.qkv = fq.LayerNormLinear(64, 96, dtype=torch.bfloat16, recipe=fq.recipes.mxfp8())

    net = torch.compile(Fused())
    fq.export(net, tmp_path, names=lambda name: name.replace("mlp.norm.", "post_norm."))
    tensors, config = read(tmp_path)
    scaled = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "qkv.linear"]
    plain = ["post_norm.weight", "qkv.norm.weight", "qkv.norm.bias", "qkv.linear.bias"]
    assert sorted(tensors) == sorted([*plain, *(f"{n}.{t}" for n in scaled for t in ("weight", "weight_scale"))])
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
    assert sorted(tensors) == ["embed.weight", "up.bias", "up.weight", "up.weight_scale"] and config["ignore"] == ["head"]


def test_packed_experts_are_written_one_by_one(tmp_path):
    """If false, experts share names, scales or blocks with their neighbours."""
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = fq.GroupedLinear(3, 64, 32, bias=False, packed=True, recipe=fq.recipes.mxfp8(), dtype=torch.bfloat16)

    net = Experts()
    fq.export(net, tmp_path)
    tensors, config = read(tmp_path)
    for e in range(3):
        got = decompressed(of_layer(tensors, f"experts.{e}"), config)
        laws.assert_same_bytes(got, codes(net.experts.weight[e], "mxfp8").dequantize(got.dtype), f"expert {e}")


def test_codes_at_rest_are_written_as_they_are(tmp_path):
    """If false, quantized parameters, whose master may be gone, or a frozen base are quantized a second time, or refused."""
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
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 32, bias=False, dtype=torch.bfloat16) for _ in range(3))
        with torch.no_grad():
            for i, layer in enumerate((self.q_proj, self.k_proj, self.v_proj)):
                layer.weight.mul_(1 + i)


def test_merged_layers_get_one_second_level_scale(tmp_path):
    """If false, vLLM decodes k by the global scale of q: it takes the largest of merged layers for all."""
    net = fq.convert(Attention(), pair_recipe("nvfp4", "nvfp4"))
    with pytest.raises(ValueError, match="q_proj, k_proj, v_proj have tensor scales of their own"):
        fq.export(net, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    fq.export(net, tmp_path / "apart", share_scales=False)
    fq.export(net, tmp_path / "shared", share_scales=True)
    apart, shared = (read(tmp_path / folder) for folder in ("apart", "shared"))
    scales = [shared[0][f"{n}.weight_global_scale"].item() for n in ("q_proj", "k_proj", "v_proj")]
    assert scales == [min(apart[0][f"{n}.weight_global_scale"].item() for n in ("q_proj", "k_proj", "v_proj"))] * 3
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(net, name).weight.detach()
        laws.assert_same_bytes(apart[0][f"{name}.weight_packed"], codes(weight, "nvfp4").data, name)
        error = (decompressed(of_layer(shared[0], name), shared[1]).float() - weight.float()).norm() / weight.float().norm()
        assert error < 0.12, (name, error)


# Files #

def test_shards_hold_what_one_file_does(tmp_path):
    """If false, a large model loses or doubles tensors at the borders of its files."""
    net = converted("nvfp4")
    fq.export(net, tmp_path / "one")
    fq.export(net, tmp_path / "many", max_shard_size="2KB")
    index = json.loads((tmp_path / "many" / writer.INDEX).read_text())
    names = sorted({*index["weight_map"].values()})
    assert len(names) > 1 and names == sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
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
    assert len({index["weight_map"][f"up.{n}"] for n in of_layer(want)} - {index["weight_map"]["up.bias"]}) == 1


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
            assert of["data_offsets"][0] % {"F32": 4, "BF16": 2, "F8_E4M3": 1}[of["dtype"]] == 0, name


@pytest.mark.parametrize("fails", ["write", "finish"])
def test_a_failure_leaves_nothing(fails, tmp_path, monkeypatch):
    """If false, a full disk leaves half a file under a name that readers trust."""
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(writer.Writer, "write", full) if fails == "write" else monkeypatch.setattr(writer, "_to_disk", full)
    with pytest.raises(OSError, match="no space left"):
        fq.export(converted("mxfp8"), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_what_a_server_does_not_hold_is_refused_before_anything_is_written(tmp_path):
    """If false, a user finds out when the server starts, or never."""
    e5m2 = fq.format_of("mxfp8", element="e5m2")
    out, net = tmp_path / "out", converted("mxfp8")
    refusals = [
        (converted("mxfp6"), {}, r"up.weight is mxfp6 in the forward, which format='compressed-tensors' does not hold; it holds"),
        (converted("fp8_1x128"), {}, "which format='compressed-tensors' does not hold"),
        (fq.convert(Net(), pair_recipe(e5m2, e5m2), skip=["head"]), {}, "does not hold"),
        (converted("mxfp4"), {"format": "modelopt"}, "which format='modelopt' does not hold"),
        (converted("fp8_tensor"), {"format": "fp8"}, "which format='fp8' does not hold"),
        (converted("fp8_128x128"), {"format": "modelopt"}, r"multiples of \[128, 128\]"),
        (converted("mxfp8", Net(cols=48)), {}, r"up.weight is \[144, 48\], and servers read mxfp8 of multiples of \[1, 32\]"),
        (Net(), {}, "found no quantized layer"), (net, {"format": "gguf"}, "format must be one of"),
        (net, {"max_shard_size": "5 parsecs"}, "max_shard_size must be"),
        (net, {"names": lambda name: "same.weight"}, "two weights are named same.weight"),
    ]
    for model, options, message in refusals:
        with pytest.raises(ValueError, match=message):
            fq.export(model, out, **options)
        assert not out.exists(), message
    fq.export(net, out)
    with pytest.raises(ValueError, match="holds model.safetensors"):
        fq.export(net, out)
