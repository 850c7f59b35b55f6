# SPDX-License-Identifier: Apache-2.0
"""`fq.refit` in one process: what a rollout engine is given is what the training forward
multiplies."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes
from dist_tests.multi import nets
from dist_tests.trainers import batch, llama
from fsdp_quant.formats import ROWWISE
from fsdp_quant.ops import reference
from fsdp_quant.serving import layouts

RECIPES = {
    "fp8_current": fq.recipes.fp8_current,
    "fp8_row": fq.recipes.fp8_row,
    "mxfp8": fq.recipes.mxfp8,
    "nvfp4": fq.recipes.nvfp4,
}


def _model(recipe: str, **options) -> torch.nn.Module:
    return fq.convert(llama().bfloat16(), RECIPES[recipe](**options), skip=["lm_head"])


class Engine:
    """Keeps each tensor of the stream by the layer it is of, and decodes as a server does."""

    def __init__(self):
        self.layers: dict[str, dict[str, torch.Tensor]] = {}

    def load_weights(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in bucket:
            layer, _, part = name.rpartition(".")
            self.layers.setdefault(layer, {})[part] = tensor

    def codes(self, layer: str, like: fq.Storage) -> fq.Storage:
        return layouts.read_storage(
            layer, self.layers[layer], like.dtype, like.data.device, like.fmt
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_engine_is_given_the_codes_that_training_multiplies(recipe: str):
    """If false, the policy that acts is not the one that learns."""
    model = _model(recipe, backward_override="dequantized")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        engine = Engine()
        for bucket in fq.refit(model, bucket_size="16KB", share_scales=False):
            engine.load_weights(bucket)
        with nets.recorded_weights() as seen:
            loss = model(input_ids=batch(0), labels=batch(0)).loss
        forward = [s for direction, s, _ in seen if direction is ROWWISE and s.fmt.is_quantized]
        names = [n for n, m in model.named_modules() if isinstance(m, fq.Linear)]
        assert len(forward) == len(names) == 14
        given = {}  # the order of a forward is not that of names: by their bytes
        for name in names:
            like = next(
                s for s in forward if s.shape == tuple(model.get_submodule(name).weight.shape)
            )
            codes = engine.codes(name, like)
            given[codes.data.numpy().tobytes()] = codes, engine.layers[name]
        for storage in forward:
            codes, tensors = given[storage.data.numpy().tobytes()]
            assert_same_bytes(codes.scale, storage.scale, f"{recipe} step {step}")
            if storage.tensor_amax is not None:
                S = reference.tensor_encode_scale(storage.tensor_amax, storage.fmt)
                assert_same_bytes(tensors["weight_global_scale"], S, f"{recipe} step {step}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "recipe, format, options",
    [
        ("mxfp8", "compressed-tensors", {}),
        ("mxfp8", "fp8", {}),
        ("nvfp4", "modelopt", {"share_scales": True}),
        ("fp8_row", "dequantized", {"dtype": torch.float32}),
        ("nvfp4", "compressed-tensors", {"share_scales": True}),
    ],
)
def test_a_stream_is_the_file_of_an_export(recipe: str, format: str, options: dict, tmp_path):
    """If false, an engine that loads the file of an export cannot load the stream, or decodes it to
    other values."""
    model = _model(recipe)
    fq.export(model, tmp_path, format, **options)
    want = load_file(tmp_path / "model.safetensors")
    for size in ("1KB", "20KB", "1GB"):
        buckets = list(fq.refit(model, format, bucket_size=size, **options))
        got = {name: tensor for bucket in buckets for name, tensor in bucket}
        assert got.keys() == want.keys() and sum(map(len, buckets)) == len(want)
        for name, tensor in want.items():
            assert_same_bytes(got[name], tensor, name)
        if size == "20KB":
            larger = [b for b in buckets if sum(t.nbytes for _, t in b) > 20_000]
            assert 2 < len(buckets) and all(
                len({n.rpartition(".")[0] for n, _ in b}) == 1 for b in larger
            )
        assert size != "1GB" or len(buckets) == 1


def test_one_process_holds_every_piece_whole():
    """If false, an engine needs another way to load what one process trains."""
    model = _model("nvfp4")
    want = dict(t for bucket in fq.refit(model, "modelopt", share_scales=True) for t in bucket)
    buckets = list(fq.refit(model, "modelopt", sharded=True, bucket_size="20KB", share_scales=True))
    pieces = {piece.name: piece for bucket in buckets for piece in bucket}
    assert len(buckets) > 2 and pieces.keys() == want.keys()
    for name, (_, tensor, shape, offsets) in pieces.items():
        assert shape == tuple(want[name].shape) and not any(offsets)
        assert_same_bytes(tensor, want[name], name)


def test_a_stream_is_the_callers_own():
    """If false, a step of training changes what an engine was given, or an engine changes what is
    trained."""
    model = _model("mxfp8")
    fq.freeze(model.model.layers[0].mlp.requires_grad_(False))
    before = {
        n: p.dequantize() if isinstance(p, fq.QuantizedTensor) else p.detach().clone()
        for n, p in model.named_parameters()
    }
    streams = [fq.refit(model, dtype=None), fq.refit(model, dtype=None, sharded=True)]
    for bucket in itertools.chain(*streams):
        for _, tensor, *_ in bucket:
            tensor.view(torch.uint8).fill_(0)
    for name, parameter in model.named_parameters():
        now = (
            parameter.dequantize()
            if isinstance(parameter, fq.QuantizedTensor)
            else parameter.detach()
        )
        assert_same_bytes(now, before[name], name)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"format": "gguf"},
            r"format must be one of \('compressed-tensors', .*, 'dequantized'\), got 'gguf'",
        ),
        (
            {"bucket_size": "lots"},
            "bucket_size must be a number of bytes, or a text such as '5GB' or '500MiB'; got "
            "'lots'",
        ),
        ({"bucket_size": 0}, "bucket_size must be a number of bytes"),
        ({"format": "modelopt"}, "which format='modelopt' does not hold"),
    ],
)
def test_what_cannot_be_streamed_is_refused_at_the_call(arguments: dict, message: str):
    """If false, an engine has some of the new weights when the rest are found to be none that it
    reads."""
    model = fq.convert(llama(), fq.recipes.hybrid("mxfp4", "mxfp8"), skip=["lm_head"])
    with pytest.raises(ValueError, match=message):
        fq.refit(model, **arguments)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_pieces_of_a_transposed_weight_are_refused(recipe: str):
    """If false, an engine is given [in, out] values for a weight [out, in]."""
    model = torch.nn.Sequential(Conv1D(64, 128), torch.nn.Linear(64, 64))
    fq.convert(model, RECIPES[recipe]())
    with pytest.raises(
        NotImplementedError,
        match=re.escape(
            "0.weight is transposed or cut by tensor parallelism; sharded=True streams weights "
            "that fully_shard alone cuts: use sharded=False"
        ),
    ):
        fq.refit(model, "dequantized", sharded=True)
    given = dict(t for bucket in fq.refit(model, "dequantized") for t in bucket)
    assert given["0.weight"].shape == model[0].weight.shape
