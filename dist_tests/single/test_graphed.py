# SPDX-License-Identifier: Apache-2.0
"""`fq.graphed` where nothing can be captured; `kernels/test_cuda_graphs.py` has the graphs."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, values
from fsdp_quant.tensor import torch_compat
from fsdp_quant.training import graphed


def train(wrap: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = fq.convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), fq.recipes.fp8_current())
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x, *, scale):
        y = net(x).square().mean() * scale
        y.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": y.detach()}

    step = fq.graphed(step, net, optimizer) if wrap else step
    made = [step(values(8, 32, seed=i, dtype=torch.float32), scale=2.0)["loss"] for i in range(5)]
    assert not wrap or "cpu" in step.why_eager
    return [*made, *(p.detach() for p in net.parameters())]


def test_steps_run_eagerly_where_there_is_no_gpu_and_say_so_once():
    """If false, a script with fq.graphed trains another model without a GPU, or fails, or is slow
    unsaid."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = train(True)
    assert [str(w.message) for w in said if "fq.graphed" in str(w.message)] == [
        "fq.graphed: steps run eagerly: the model is on cpu, and CUDA graphs run on GPUs"
    ]
    for a, b in zip(got, train(False)):
        assert_same_bytes(a, b, "graphed")


def test_a_capture_without_warm_up_is_refused():
    """If false, lazily made optimizer state is captured, and every replay begins with it again."""
    with pytest.raises(ValueError, match="warmup is 0; a capture needs at least one eager step"):
        fq.graphed(print, nn.Linear(2, 2), warmup=0)


# Graphs, with a CPU in the place of the GPU #


class Recorder:
    """What `torch.cuda` is to `graphed`: a captured step leaves no trace, and a replay runs it
    again."""

    def __init__(self, monkeypatch):
        self.captures, self.replays, self.step, self.kept = 0, 0, None, []
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, weight_proxy in {
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": contextlib.nullcontext,
            "CUDAGraph": lambda: SimpleNamespace(replay=self.replay, reset=lambda: None),
            "graph": self.capture,
        }.items():
            monkeypatch.setattr(torch.cuda, name, weight_proxy)
        monkeypatch.setattr(graphed.GraphedStep, "_refusal", lambda step: None)
        monkeypatch.setattr(torch_compat, "is_captured", lambda x: self.captures is None)

    @contextlib.contextmanager
    def capture(self, graph, stream, capture_error_mode):
        before, captures, self.captures = [(t, t.clone()) for t in self.kept], self.captures, None
        try:
            yield
        finally:
            self.captures = captures + 1
            for t, value in before:
                t.data.copy_(value)

    def replay(self) -> None:
        self.replays += 1
        args, kwargs = torch_compat.tree_unflatten(self.step._inputs, self.step._signature[0])
        for target, value in zip(
            self.step._outputs.values(), self.step._step(*args, **kwargs).values()
        ):
            target.copy_(value)


def trained(
    wrap: bool, recorder: Recorder | None = None, waits: bool = False
) -> list[torch.Tensor]:
    """Eight steps: the sixth of another shape, another recipe before the seventh, and a rate that
    falls."""
    torch.manual_seed(0)
    net = fq.convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), fq.recipes.fp8_current())
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5))

    def step(x):
        y = net(x).square().mean()
        y.backward()
        if waits and wrap and recorder.captures is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": y.detach()}

    run = fq.graphed(step, net, optimizer) if wrap else step
    if wrap:
        recorder.step, recorder.kept = run, list(net.parameters())
    seen = []
    for i in range(8):
        optimizer.param_groups[0]["lr"].fill_(0.5 / (1 + i))
        if i == 6:
            fq.set_recipe(net, fq.recipes.mxfp8())
        seen.append(run(values(4 if i == 5 else 8, 32, seed=i, dtype=torch.float32))["loss"])
    return [*seen, *(p.detach() for p in net.parameters())]


def test_a_step_is_warmed_up_captured_and_replayed(monkeypatch):
    """If false, a step is made twice or never, reads another batch, returns memory that the next
    one writes, or outlives its recipe."""
    want, recorder = trained(False), Recorder(monkeypatch)
    with pytest.warns(
        UserWarning, match="a step runs eagerly: its arguments are other than those of the capture"
    ):
        got = trained(True, recorder)
    for i, (a, b) in enumerate(zip(got, want)):
        assert_same_bytes(a, b, f"{i}")
    # Three to warm up; the fourth and fifth are replays, as is the eighth, of a graph with the new
    # recipe.
    assert (recorder.captures, recorder.replays) == (2, 3)


@pytest.mark.parametrize("end", ["destroy_process_group", "_abort_process_group"])
def test_the_end_of_a_process_group_resets_captured_steps(monkeypatch, end: str):
    """If false, NCCL waits for ever for the graph, whose collectives its communicator holds."""
    recorder, ends = Recorder(monkeypatch), []
    graph = SimpleNamespace(replay=recorder.replay, reset=lambda: ends.append("graph"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    c10d = torch.distributed.distributed_c10d
    for module in (torch.distributed, c10d):  # torch's, and then ours around it
        for name in ("destroy_process_group", "_abort_process_group"):
            monkeypatch.setattr(module, name, lambda: ends.append("group"), raising=False)
    torch_compat.wrap_ends_of_groups.cache_clear()
    step = fq.graphed(lambda: {}, nn.Linear(2, 2), warmup=1)
    recorder.step = step
    for _ in range(3):
        step()
    assert (recorder.captures, recorder.replays) == (1, 2)
    getattr(c10d, end)()
    assert ends == ["graph", "group"]
    step()
    step()
    assert recorder.captures == 2, "and the step is captured again"
    torch_compat.wrap_ends_of_groups.cache_clear()


def test_a_capture_that_fails_costs_no_step(monkeypatch):
    """If false, a step that cannot be captured stops training, or its gradients are left in memory
    that nothing wrote."""
    want, recorder = trained(False), Recorder(monkeypatch)
    with pytest.warns(
        UserWarning, match="steps run eagerly: its capture failed: operation not permitted"
    ):
        got = trained(True, recorder, waits=True)
    for i, (a, b) in enumerate(zip(got, want)):
        assert_same_bytes(a, b, f"{i}")
    assert recorder.replays == 0


def stepped(rebind: bool, computes: str, recorder: Recorder | None = None) -> list[torch.Tensor]:
    """Seven steps of two layers by their `main_grad`, which another tensor replaces before the
    sixth. computes: where `backward_dw` is called: "", "inside" the step or "outside"."""
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": bool(computes)}
    layers = [fq.Linear(32, 32, False, recipe="mxfp8", name=f"{i}", **options) for i in range(2)]
    net = nn.Sequential(*layers)
    for p in net.parameters():
        p.main_grad = torch.zeros(p.shape)

    def update() -> None:
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.main_grad, alpha=0.5)
                p.main_grad.zero_()

    def step(x):
        y = net(x).square().mean()
        y.backward()
        if computes != "outside":
            fq.steps.backward_dw(net)
            update()
        return {"loss": y.detach()}

    run = step if recorder is None else fq.graphed(step, net)
    if recorder is not None:
        recorder.step = run
        recorder.kept = [t for p in net.parameters() for t in (p, p.main_grad)]
    seen = []
    for i in range(7):
        if rebind and i == 5:
            net[1].weight.main_grad = torch.zeros(32, 32)
            if recorder is not None:
                recorder.kept.append(net[1].weight.main_grad)
        seen.append(run(values(8, 32, seed=i, dtype=torch.float32))["loss"])
        if computes == "outside":
            fq.steps.backward_dw(net)
            update()
    assert recorder is None or (run.why_eager is None) == (computes != "outside"), run.why_eager
    return [*seen, *(p.detach() for p in net.parameters())]


@pytest.mark.parametrize("computes", ["", "inside", "outside"])
def test_a_captured_step_takes_wgrads_where_they_go(monkeypatch, computes: str):
    """If false, replays add to a `main_grad` that nobody reads, or a wgrad that is computed outside
    the captured step is that of the capture, or lost."""
    want, recorder = stepped(False, ""), Recorder(monkeypatch)
    waits = "its capture failed: 0: a weight gradient of delay_wgrad_compute=True waits .*inside"
    said = pytest.warns(UserWarning, match=waits) if computes == "outside" else None
    with said or contextlib.nullcontext():
        got = stepped(True, computes, recorder)
    for i, (a, b) in enumerate(zip(got, want)):
        assert_same_bytes(a, b, f"{i}")
    assert (recorder.captures, recorder.replays) == ((1, 0) if computes == "outside" else (2, 3))
    layer = fq.Linear(32, 32, recipe="mxfp8", name="0", delay_wgrad_compute=True)
    layer(torch.ones(8, 32)).sum().backward()
    recorder.captures = None  # a capture by hand
    with pytest.raises(RuntimeError, match=waits.partition(": ")[2]):
        layer.backward_dw()
    recorder.captures = 0
    layer.backward_dw()
    assert layer.weight.grad is not None


# transformers #


def test_masks_are_the_same_in_warm_up_and_capture(monkeypatch):
    """If false, a capture of a transformers model compiles its layers inside, or its attention
    reads a mask that says nothing."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    net, ids, masks = transformers.LlamaForCausalLM(config), torch.ones(2, 16, dtype=torch.long), []
    net.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"] is not None),
        with_kwargs=True,
    )
    inputs = (
        {},
        {"attention_mask": torch.ones_like(ids)},
        {"position_ids": torch.arange(16).expand(2, -1)},
    )
    for which, want in zip(inputs, (False, True, True)):
        recorder = Recorder(monkeypatch)
        recorder.step = step = graphed.graphed(
            lambda: {"y": net(input_ids=ids, **which).logits.detach()}, net, warmup=2
        )
        for _ in range(3):
            step()
        assert recorder.captures == 1 and masks[:3] == [want] * 3, (which, masks)
        masks.clear()
        net(input_ids=ids, **which)
        assert masks == [False], "transformers decides by itself again"
        masks.clear()


@pytest.mark.parametrize(
    "context",
    [
        fq.numerics.batch_invariant,
        lambda: fq.autocast("mxfp8"),
        lambda: fq.autocast(enabled=False),
        lambda: fq.token_offset(64),
    ],
)
def test_a_step_inside_a_context_is_captured_again(context, monkeypatch):
    """If false, a replay inside the context multiplies as outside, or the other way round."""
    recorder = Recorder(monkeypatch)
    recorder.step = step = fq.graphed(lambda: {}, nn.Linear(2, 2), warmup=1)
    step()
    step()
    for calls in (3, 2):  # one eager, one captured, one more replay; then replays alone
        with context():
            for _ in range(calls):
                step()
    assert (recorder.captures, recorder.replays) == (2, 5)


def test_rates_in_tensors_make_no_real_parameters_of_fake_ones(monkeypatch):
    """If false, DTensor runs a fused Adam once on real tensors of the unsharded sizes before a
    capture, 150 s for 8 B parameters."""
    graphed._make_capturable(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    monkeypatch.setattr(torch._subclasses.fake_tensor, "run_fallback_kernel", None)
    with FakeTensorMode():
        state = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4), "step": torch.zeros(())}
        for kind in (torch.optim.Adam, torch.optim.AdamW):
            p = nn.Parameter(torch.zeros(4))
            optimizer = kind([p], lr=torch.tensor(0.1), fused=True)
            optimizer.state[p], p.grad = dict(state), torch.ones(4)
            optimizer.step()
