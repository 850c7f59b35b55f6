# SPDX-License-Identifier: Apache-2.0
"""A converted model of transformers does not wait to learn that no sequences are packed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_quant as fq
from fsdp_quant.models import transformers_masks

transformers = pytest.importorskip("transformers")
IDS = torch.arange(32).view(2, 16) % 64
PACKED = torch.arange(16).remainder(5).expand(2, -1)
LLAMA = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, vocab_size=64)


class Reads(TorchDispatchMode):
    """Counts the values that the host reads of tensors."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, num_hidden_layers=1, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def read(net: nn.Module, **inputs) -> tuple[int, torch.Tensor | None, torch.Tensor]:
    """(values that the host reads in a forward, the mask that a layer gets, logits)."""
    masks, layer = [], net.get_submodule("model.layers.0")
    hook = layer.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with Reads() as reads, torch.no_grad():
        logits = net(IDS, **inputs).logits
    hook.remove()
    return reads.number, masks[0], logits


def test_a_forward_reads_nothing_and_computes_the_same():
    """If false, each step of transformers' models begins on an idle device."""
    plain = llama()
    net = fq.convert(llama(), "bf16")
    assert read(plain)[0] > 0, "transformers reads nothing any more: the patch can go"
    number, mask, logits = read(net)
    assert number == 0 and mask is None
    assert torch.equal(logits, read(plain)[2])


@pytest.mark.parametrize(
    "family, own",
    [
        ("gemma3_text", {"head_dim": 32}),  # two kinds of masks
        ("mistral", {}),
        ("phi3", {"pad_token_id": 0}),
        ("qwen3_moe", {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
        ("starcoder2", {}),
    ],
)
def test_no_family_reads_in_a_training_step(family, own):
    """If false, steps of a family that people train begin on an idle device."""
    sizes = LLAMA | {"num_key_value_heads": 2, "num_hidden_layers": 1, "use_cache": False}
    config = transformers.CONFIG_MAPPING[family](**sizes | own)
    net, reads = transformers.AutoModelForCausalLM.from_config(config).train(), []
    for _ in range(2):
        with Reads() as counted:
            net(input_ids=IDS, labels=IDS).loss.backward()
        reads.append(counted.number)
        if not reads[1:]:
            fq.convert(net, "bf16")
    assert reads[0] > 0 and reads[1] == 0, reads


def test_positions_from_outside_are_read():
    """If false, packed sequences read each other."""
    net, plain = fq.convert(llama(), "bf16"), llama()
    want = read(plain, position_ids=PACKED)
    number, mask, logits = read(net, position_ids=PACKED)
    assert number == want[0] > 0 and torch.equal(mask, want[1])
    assert torch.equal(logits, want[2]) and not torch.equal(logits, read(net)[2])
    with torch.no_grad():
        assert torch.equal(net(IDS, None, PACKED).logits, logits)


def test_a_model_inside_another_is_judged_by_its_own_call():
    """If false, a model that packs is trusted because the one around it does not."""

    class Around(transformers.LlamaModel):
        def forward(self, input_ids, position_ids=None):
            return inner(input_ids, position_ids=PACKED)

    inner = llama()
    around = fq.convert(nn.ModuleList([Around(inner.config), inner]), "bf16")[0]
    want = read(llama(), position_ids=PACKED)[2]
    with torch.no_grad():
        assert torch.equal(around(IDS).logits, want)


def test_a_model_that_makes_positions_of_a_mask_is_read():
    """If false, a model whose positions may jump gets no mask for that."""
    opt = transformers.models.opt.modeling_opt.OPTDecoder.forward
    assert transformers_masks._counting(opt)[0] is None

    class Packs(transformers.LlamaModel):  # not of transformers: its code may do anything
        def forward(self, input_ids, position_ids=None):
            torch.arange(3)
            return super().forward(input_ids, position_ids=PACKED)

    net = Packs(llama().config)
    net.load_state_dict(llama().model.state_dict())
    want = llama().model(IDS, position_ids=PACKED).last_hidden_state
    assert torch.equal(fq.convert(net, "bf16")(IDS).last_hidden_state, want)
    net = fq.convert(llama().model, "bf16")
    patched = net.forward
    net.forward = lambda ids: (torch.arange(3), patched(ids, position_ids=PACKED))[1]
    assert torch.equal(net(IDS).last_hidden_state, want)


def test_a_whole_model_is_one_graph_without_a_mask():
    """If false, torch.compile breaks the graph of a model at our hooks, or its attention multiplies
    by a mask, which the fastest kernels refuse."""
    net, masks = fq.convert(llama(), "bf16"), []

    def backend(graph, inputs):
        calls = [n for n in graph.graph.nodes if "dot_product_attention" in str(n.target)]
        masks.extend(n.kwargs["attn_mask"] for n in calls)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(IDS).logits, net(IDS).logits, atol=1e-5)
        assert not transformers_masks._RUNNING.models
        # before torch 2.13 transformers takes every graph for one that is exported
        is_new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
        assert len(masks) == 1 and (masks[0] is None or not is_new)
        packed = compiled(IDS, position_ids=PACKED).logits
        assert torch.allclose(packed, net(IDS, position_ids=PACKED).logits, atol=1e-5)
        assert masks[1] is not None and not torch.allclose(packed, net(IDS).logits, atol=1e-5)


def test_an_error_in_a_forward_leaves_nothing():
    """If false, later forwards of other models are judged by a call that is over."""
    net = fq.convert(llama(), "bf16")
    with pytest.raises(IndexError):
        net(IDS + 64)
    assert not transformers_masks._RUNNING.models
    assert read(llama())[0] > 0, "a model that was not converted is trusted"


def test_copies_keep_it_and_unconvert_undoes_it():
    """If false, a copy waits again, or a model that was unconverted keeps our hooks."""
    net = fq.convert(llama(), "mxfp8", skip="lm_head")
    hooks = [len(m._forward_hooks) for m in net.modules()]
    transformers_masks.trust_counted_positions(net)
    assert hooks == [len(m._forward_hooks) for m in net.modules()], "hooked twice"
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert read(other)[0] == 0
        fq.unconvert(other)
        assert read(other)[0] > 0 and not any(m._forward_hooks for m in other.modules())
        assert not any(m._forward_pre_hooks for m in other.modules())
    assert read(net)[0] == 0
