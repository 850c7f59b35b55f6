# SPDX-License-Identifier: Apache-2.0
"""Files for inference servers: every weight is decoded by the servers' own libraries, or by a
formula written out here.
"""

from __future__ import annotations

import json
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
from fsdp_quant.storage import Storage

pytest.importorskip("compressed_tensors")
N, K = 144, 256
HELD = [
    "fp8_tensor",
    "fp8_row",
    "fp8_128x128",
    "mxfp8",
    "mxfp8_32x32",
    "mxfp4",
    "nvfp4",
    "nvfp4_16x16",
]


def values(rows: int = N, cols: int = K, seed: int = 0) -> Tensor:
    """bf16 whose amax, 2688 / 1024, has a power of two as second-level scale: a server's order of
    products rounds alike.
    """
    x = laws.values(rows, cols, seed=seed, dtype=torch.bfloat16).clamp(-2, 2)
    x[0, 0] = 2.625
    return x


class Net(nn.Module):
    """Two layers, one of which a test leaves high precision."""

    def __init__(self, rows: int = N, cols: int = K, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.up, self.head = (
            nn.Linear(cols, rows, dtype=dtype),
            nn.Linear(rows, 8, bias=False, dtype=dtype),
        )
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
    return (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text())["quantization_config"],
    )


def of_layer(tensors: dict[str, Tensor], layer: str = "up") -> dict[str, Tensor]:
    return {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == layer}


def decompressed(tensors: dict[str, Tensor], config: dict, group: str = "group_0") -> Tensor:
    """What the compressed-tensors library makes of a layer, by the scheme that the configuration
    gives it.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = QuantizationConfig.model_validate(config).config_groups[group]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(tensors, scheme)["weight"]


@pytest.mark.parametrize("fmt", HELD)
def test_compressed_tensors_decodes_our_values(fmt, tmp_path):
    """If false, vLLM multiplies other weights than training did: a name, a shape, a convention or
    the nibble order is wrong.
    """
    net = converted(fmt)
    fq.export(net, tmp_path)
    tensors, config = read(tmp_path)
    want = codes(net.up.weight, fmt)
    got = decompressed(of_layer(tensors), config)
    laws.assert_same_bytes(got, want.dequantize(got.dtype), fmt)
    assert config["ignore"] == ["head"] and tensors["head.weight"].dtype is torch.bfloat16
    laws.assert_same_bytes(tensors["up.bias"], net.up.bias.detach(), "bias")


def test_nvfp4_of_any_amax_decodes_within_an_ulp(tmp_path):
    """If false, the global scale is no encode scale, or not that of this tensor. The library
    divides where we multiply.
    """
    net = converted("nvfp4")
    with torch.no_grad():
        net.up.weight.mul_(0.37)
    fq.export(net, tmp_path)
    got, want = (
        decompressed(of_layer((of := read(tmp_path))[0]), of[1]),
        codes(net.up.weight, "nvfp4").dequantize(torch.bfloat16),
    )
    apart = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3


MODELOPT = {
    "fp8_tensor": ("FP8_PER_CHANNEL_PER_TOKEN", [N]),
    "fp8_row": ("FP8_PER_CHANNEL_PER_TOKEN", [N]),
    "fp8_128x128": ("FP8_PB_WO", [2, 1, 2, 1]),
    "mxfp8": ("MXFP8", [N, K // 32]),
    "nvfp4": ("W4A16_NVFP4", [N, K // 16]),
}


@pytest.mark.parametrize("fmt", MODELOPT)
def test_modelopt_files_decode_to_our_values(fmt, tmp_path):
    """If false, vLLM's and SGLang's modelopt loaders read other weights: shapes and algorithms are
    those that they register.
    """
    net = converted(fmt, Net(rows=256) if fmt == "fp8_128x128" else Net())
    fq.export(net, tmp_path, "modelopt")
    tensors, config = read(tmp_path)
    algorithm, shape = MODELOPT[fmt]
    assert (
        config["quant_method"] == "modelopt"
        and config["quant_algo"] == algorithm
        and config["ignore"] == ["head"]
    )
    beside = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert beside["quantization"]["quant_algo"] == algorithm and beside["quantization"][
        "exclude_modules"
    ] == ["head"]
    up, want = of_layer(tensors), codes(net.up.weight, fmt)
    assert list(up["weight_scale"].shape) == shape
    if fmt == "nvfp4":
        assert up["weight"].dtype is torch.uint8 and up["weight_scale_2"].shape == ()
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = torch.cat([table, -table])
        element = table[torch.stack([up["weight"] & 15, up["weight"] >> 4], -1).flatten(1).int()]
        got = element * up["weight_scale"].float().repeat_interleave(16, 1) * up["weight_scale_2"]
    elif fmt == "mxfp8":
        got = up["weight"].float() * (2.0 ** (up["weight_scale"].float() - 127)).repeat_interleave(
            32, 1
        )
    elif fmt == "fp8_128x128":
        got = up["weight"].float() * up["weight_scale"][:, 0, :, 0].repeat_interleave(
            128, 0
        ).repeat_interleave(128, 1)
    else:
        got = up["weight"].float() * up["weight_scale"][:, None]
    laws.assert_same_bytes(got, want.dequantize(torch.float32), fmt)


def test_modelopt_nvfp4_is_what_the_converter_to_compressed_tensors_takes(tmp_path):
    """If false, weight_scale_2 or input_scale is not the inverse of what compressed-tensors
    stores.
    """
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    net = converted("nvfp4_16x16")
    for target in ("modelopt", "compressed-tensors"):
        fq.export(net, tmp_path / target, target, input_amax={"up": 2688 / 2**9})
    got = ModelOptNvfp4Converter(ignore=["head"], targets=["re:.*up"]).process(
        dict(read(tmp_path / "modelopt")[0])
    )
    want, config = read(tmp_path / "compressed-tensors")
    for name in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"):
        laws.assert_same_bytes(
            got[f"up.{name}"].reshape(want[f"up.{name}"].shape), want[f"up.{name}"], name
        )
    assert (
        want["up.weight_global_scale"].item() == 1024
        and want["up.input_global_scale"].item() == 512
    )
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    assert read(tmp_path / "modelopt")[1]["quant_algo"] == "NVFP4"


def test_deepseeks_layout_is_what_its_dequantizer_reads(tmp_path):
    """If false, weight_scale_inv is no decode scale, or blocks at the edge are lost."""
    from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer

    net = converted("fp8_128x128", Net(rows=200))
    fq.export(net, tmp_path, "fp8")
    tensors, config = read(tmp_path)
    assert config["weight_block_size"] == [128, 128] and config["modules_to_not_convert"] == config[
        "ignored_layers"
    ] == ["head"]
    got = FP8BlockDequantizer(targets=["re:.*up"], dtype=torch.bfloat16).process(dict(tensors))[
        "up.weight"
    ]
    laws.assert_same_bytes(
        got, codes(net.up.weight, "fp8_128x128").dequantize(torch.bfloat16), "weight"
    )


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
    for name, recipe, dynamic in (
        ("w", fq.CustomRecipe(_weights_alone), None),
        ("wi", pair_recipe("mxfp8", "mxfp8"), True),
    ):
        fq.export(fq.convert(Net(), recipe, skip=["head"]), tmp_path / name)
        inputs = read(tmp_path / name)[1]["config_groups"]["group_0"]["input_activations"]
        assert (inputs and inputs["dynamic"]) == dynamic, name


def _weights_alone(role: fq.Role):
    return "mxfp8" if role.tensor_type == "weight" else "identity"
