# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning whose rollouts and training multiply the same codes.

    python examples/rollout.py [--recipe mxfp8] [--rounds 40]

A policy acts from exported codes, as an inference server would, and learns from its actions. With
backward_override="dequantized" the training forward multiplies the codes of the rollout. Both
compute the same probabilities bit for bit, so the first update of a round is exactly on policy.
The backward multiplies the decoded codes, so gradients are those of the policy that acted.

    export(model)               codes of every weight, quantized as in the training forward
    Rollout(model, codes)       acts: quantize, multiply, nothing else
    fq.convert(model, recipe)   learns: the same codes, high-precision gradients
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_quant as fq


class Policy(nn.Module):
    """Logits of an action, [B, states] -> [B, actions]."""

    def __init__(self, states: int = 32, actions: int = 16, width: int = 64):
        super().__init__()
        self.up, self.middle = nn.Linear(states, width), nn.Linear(width, width)
        self.head = nn.Linear(width, actions)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.middle(F.silu(self.up(x)))))


def export(model: nn.Module) -> dict[str, fq.numerics.Storage]:
    """Name of each converted layer -> rowwise codes of its weight, which a server would load."""
    codes = {}
    for name, layer in model.named_modules():
        if isinstance(layer, fq.Linear):
            weight = layer.state_dict()["weight"]
            quantized = layer.plan.weight.rowwise.fmt.is_quantized
            codes[name] = layer.plan.weight.rowwise.storage(
                weight.to(layer.recipe.compute_dtype)
                if quantized and layer.recipe.compute_dtype
                else weight,
                fq.numerics.ROWWISE,
            )
    return codes


class Rollout:
    """The policy on exported codes: no masters, no autograd, no fq.Linear."""

    def __init__(self, model: Policy, codes: dict[str, fq.numerics.Storage]):
        self.codes = codes
        self.quantizers = {name: model.get_submodule(name).plan.input.rowwise for name in codes}
        self.biases = {name: model.get_submodule(name).bias.detach().clone() for name in codes}

    def layer(self, name: str, x: Tensor) -> Tensor:
        return fq.numerics.gemm(
            self.quantizers[name].storage(x, fq.numerics.ROWWISE),
            self.codes[name],
            bias=self.biases[name],
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer("head", F.silu(self.layer("middle", F.silu(self.layer("up", x)))))


def log_probabilities(logits: Tensor, actions: Tensor) -> Tensor:
    return F.log_softmax(logits.float(), -1).gather(1, actions[:, None])[:, 0]


def play(
    rollout: Rollout, states: Tensor, wanted: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """(actions, their log probabilities, rewards) for a batch of states."""
    logits = rollout(states)
    actions = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)[:, 0]
    return actions, log_probabilities(logits, actions), (actions == wanted).float()


def train(
    recipe: fq.Recipe, rounds: int = 40, updates: int = 2, batch: int = 128, seed: int = 0
) -> list[dict[str, float]]:
    """Policy gradients with clipped ratios. Returns per round the mean reward, and the largest
    |log ratio| before an update."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = fq.convert(Policy(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    rule = torch.randn(32, 16, generator=generator)
    told = []
    for _ in range(rounds):
        states = torch.randn(batch, 32, generator=generator)
        actions, acted, rewards = play(
            Rollout(model, export(model)), states, (states @ rule).argmax(-1), generator
        )
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-3)
        for update in range(updates):
            log_ratio = log_probabilities(model(states), actions) - acted
            if update == 0:
                told.append({"reward": rewards.mean().item(), "off": log_ratio.abs().max().item()})
            ratio = log_ratio.exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=fq.recipes.names(), default="mxfp8")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    told = train(fq.recipes.by_name(args.recipe, backward_override="dequantized"), args.rounds)
    for i in range(0, len(told), max(1, len(told) // 8)):
        print(
            f"round {i:4}  reward {told[i]['reward']:.3f}  largest |log ratio| before the first "
            f"update {told[i]['off']:.1e}"
        )


if __name__ == "__main__":
    main()
