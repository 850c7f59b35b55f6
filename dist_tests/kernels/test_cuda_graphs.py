# SPDX-License-Identifier: Apache-2.0
"""Training steps as CUDA graphs: a replay is the eager step, whatever the recipe keeps from step to
step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.kernels import expected
from dist_tests.kernels.test_gemm import RECIPES
from dist_tests.laws import assert_same_bytes, values
from fsdp_quant.context import STEP
from fsdp_quant.linear import guard

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")
BF16, D, HIDDEN, TOKENS, STEPS = torch.bfloat16, 128, 256, 64, 3


@pytest.fixture(autouse=True)
def _no_guard(monkeypatch):
    """Counts reach the host at times of their own, and move products then."""
    monkeypatch.setattr(guard, "apply_underflow_policy", lambda: None)


class Net(nn.Module):
    """Two fused blocks between plain layers, one of which is used twice."""

    def __init__(self, name: str):
        super().__init__()
        torch.manual_seed(0)
        options = {"residual": True, "device": "cuda", "dtype": BF16}
        options |= {"bias": False, "normalization": "RMSNorm"}
        self.head = nn.Linear(D, D, device="cuda", dtype=BF16)
        self.blocks = nn.ModuleList(
            fq.LayerNormMLP(D, HIDDEN, recompute=r, recipe=RECIPES[name](), name=f"{r}", **options)
            for r in (None, "gate_up")
        )
        fq.convert(self, RECIPES[name]())

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches() -> list[tuple[Tensor, Tensor]]:
    return [
        tuple(values(TOKENS, D, seed=2 * i + j, dtype=BF16).cuda() for j in (0, 1))
        for i in range(2 * STEPS)
    ]


def start(name: str) -> tuple[Net, torch.optim.Optimizer]:
    STEP.step, STEP.counted_by_hand = 0, False
    STEP.publish()
    net = Net(name)
    if name == "fp8_current":
        return net, fq.optim.FusedAdam(
            net.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True
        )
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, capturable=True)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, dy: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    y = net(x)
    y.backward(dy)
    optimizer.step()
    return y.detach()


def state_of(net: nn.Module) -> dict[str, Tensor]:
    state = {f"{n}.grad": p.grad for n, p in net.named_parameters()} | dict(net.state_dict())
    for module in net.modules():
        if isinstance(module, fq.Linear):
            for key, history in module._weight_state.histories.items():
                state |= {f"{key} {k}": v for k, v in history.state_dict().items()}
    return {k: v.detach().clone() for k, v in state.items()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], when: str) -> None:
    assert got.keys() == want.keys()
    for what, tensor in want.items():
        assert_same_bytes(got[what].cpu(), tensor.cpu(), f"{when}: {what}")


def aside(run) -> None:
    """On another stream, as torch asks of what comes before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("name", list(RECIPES))
def test_replays_of_a_whole_step_are_eager_steps(name: str):
    """If false, a replay multiplies codes of earlier weights, repeats its random bits, or scales by
    an old history."""
    data, results = batches(), []
    for captured in (False, True):
        net, optimizer = start(name)
        x, dy = (t.clone() for t in data[0])

        def warm_up(net=net, optimizer=optimizer, x=x, dy=dy):
            for a, b in data[:STEPS]:
                train(net, optimizer, x.copy_(a), dy.copy_(b))

        aside(warm_up)
        seen = []
        if captured:
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                y = train(net, optimizer, x, dy)
        for a, b in data[STEPS:]:
            x.copy_(a), dy.copy_(b)
            if captured:
                graph.replay()
            else:
                y = train(net, optimizer, x, dy)
            seen.append(state_of(net) | {"y": y.clone(), "step": STEP.on(x.device).clone()})
            with torch.no_grad():
                seen.append({"y of an evaluation": net.eval()(x)})
            net.train()
        results.append(seen)
    for i, (want, got) in enumerate(zip(*results)):
        assert_same(got, want, f"{name}, {i}")


@pytest.mark.parametrize("name", list(RECIPES))
def test_graphed_callables_are_eager_modules(name: str):
    """If false, the forward of a graphed module multiplies the weights that it was captured
    with."""
    data, results = batches(), []
    for graphed in (False, True):
        net, optimizer = start(name)
        net.blocks = net.blocks[:1]
        train(net, optimizer, *data[0])
        before = fq.state_dict(net)
        # a block: torch graphs no module with hooks, such as the one that counts the steps of the
        # model
        if graphed:
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.make_graphed_callables(net.blocks[0], (data[0][0].clone().requires_grad_(),))
        fq.load_state_dict(net, before)  # not what warming up has left in the histories
        seen = []
        for x, dy in data[1 : STEPS + 1]:
            y = train(net, optimizer, x, dy)
            seen.append(state_of(net) | {"y": y.clone()})
        results.append(seen)
    for i, (want, got) in enumerate(zip(*results)):
        assert_same(got, want, f"{name}, {i}")


def test_a_graph_does_not_hold_a_step_of_the_host():
    """If false, every replay begins the step of the capture again."""
    net, optimizer = start("nvfp4")
    aside(lambda: train(net, optimizer, *batches()[0]))
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(ValueError, match="would repeat them at every replay"),
        torch.cuda.graph(graph),
    ):
        fq.begin_step(3)


# fq.graphed #


def graphed_steps(
    name: str, wrap: bool, own, rates: tuple[float, ...] = (1e-2,) * 8
) -> tuple[list[dict], object]:
    """Outputs and states of eight steps, and the step; own: (net, optimizer) -> step."""
    net, optimizer = start(name)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(1e-2, device="cuda")
    step, seen = own(net, optimizer), []
    step = fq.graphed(step, net, optimizer) if wrap else step
    for (x, dy), rate in zip(batches() + batches()[:2], rates):
        for group in optimizer.param_groups:
            group["lr"].fill_(rate)
        y = step(x, dy)
        seen.append(dict(net.state_dict()) | {"y": y, "step": torch.tensor(STEP.step)})
        seen[-1] = {k: v.clone() for k, v in seen[-1].items()}
    return seen, step


def plain(net: nn.Module, optimizer: torch.optim.Optimizer):
    def step(x, dy):
        y = net(x)
        y.backward(dy)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return y.detach()

    return step


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_graphed_step_is_the_eager_one(name: str):
    """If false, fq.graphed trains another model, by its rates, random bits, histories or
    clipping."""
    rates = (1e-2, 1e-2, 5e-3, 5e-3, 2e-3, 1e-3, 5e-4, 0.0)
    want, _ = graphed_steps(name, False, plain, rates)
    got, step = graphed_steps(name, True, plain, rates)
    assert step.why_eager is None and step._graph is not None
    for i, (a, b) in enumerate(zip(got, want)):
        assert_same(a, b, f"{name}, {i}")


def test_a_step_that_cannot_be_captured_runs_eagerly():
    """If false, a step that waits for the device stops training, or loses a step, or breaks random
    numbers."""

    def waits(net, optimizer):
        run = plain(net, optimizer)

        def step(x, dy):
            y = run(x, dy)
            return y * float(y.sum().isfinite())

        return step

    want, _ = graphed_steps("nvfp4", False, waits)
    with pytest.warns(UserWarning, match="steps run eagerly: its capture failed: .*captur"):
        got, step = graphed_steps("nvfp4", True, waits)
    assert step.why_eager is not None
    for i, (a, b) in enumerate(zip(got, want)):
        assert_same(a, b, f"{i}")
    torch.nn.functional.dropout(torch.ones(8, device="cuda")).sum().item()


def test_a_graph_follows_what_changes_around_it():
    """If false, a replay multiplies formats of before, or fails for the last batch of an epoch."""

    def run(wrap: bool):
        net, optimizer = start("fp8_current")
        step = fq.graphed(plain(net, optimizer), net, optimizer) if wrap else plain(net, optimizer)
        seen = []
        for i, (x, dy) in enumerate(batches() + batches()):
            if i == 6:
                fq.set_recipe(net, RECIPES["mxfp8"]())
            short = slice(0, 16) if i == 5 else slice(None)
            seen.append(
                {
                    "y": step(x[short], dy[short]).clone(),
                    **{k: v.clone() for k, v in net.state_dict().items()},
                }
            )
        return seen, step

    want, _ = run(False)
    with pytest.warns(UserWarning, match="its arguments are other than those of the capture"):
        got, step = run(True)
    assert step.why_eager is None and step._graph is not None
    for i, (a, b) in enumerate(zip(got, want)):
        assert_same(a, b, f"{i}")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_compiled_layers_of_transformers_are_captured(family: str):
    """If false, a capture gives the layers a mask that no step before it gave, and fails as they
    are compiled again; or a backward meets nodes of passes on another stream.
    """
    transformers = pytest.importorskip("transformers")
    experts = (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        if family == "qwen3_moe"
        else {}
    )
    config = transformers.CONFIG_MAPPING[family](
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=256,
        use_cache=False,
        **experts,
    )

    def run(wrap: bool):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.device("cuda"):
            net = transformers.AutoModelForCausalLM.from_config(config).to(BF16)
        fq.convert(net, RECIPES["fp8_current"](), "lm_head")
        for layer in net.model.layers:
            layer.compile()
        optimizer = torch.optim.AdamW(
            net.parameters(), lr=torch.tensor(1e-3, device="cuda"), fused=True, capturable=True
        )

        def step(ids):
            loss = net(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses = [step(values(2, 64, seed=6).to("cuda").mul(64).long() % 256)]
        step = fq.graphed(step, net, optimizer) if wrap else step
        losses += [step(values(2, 64, seed=i).to("cuda").mul(64).long() % 256) for i in range(6)]
        return {"loss": torch.stack(losses), **net.state_dict()}, step

    want, _ = run(False)
    got, step = run(True)
    assert step.why_eager is None and step._graph is not None
    assert_same(got, want, "transformers")
