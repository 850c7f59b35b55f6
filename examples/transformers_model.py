# SPDX-License-Identifier: Apache-2.0
"""Train a transformers model: python examples/transformers_model.py [--recipe mxfp8] [--steps 20]

A small Llama with random weights learns four sequences by heart; pass --model for a pretrained one.
The output head stays in high precision. With transformers' Trainer, pass
`callbacks=[fq.integrations.transformers.Callback("mxfp8", skip=["lm_head"])]` instead.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import fsdp_quant as fq

TINY = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, max_position_embeddings=128,
)  # fmt: skip


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="fp8_current")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--model", help="a name or folder of a pretrained model (default: a tiny random Llama)"
    )
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        if args.model
        else AutoModelForCausalLM.from_config(TINY)
    )
    model = fq.convert(made.to(device, dtype), args.recipe, skip=["lm_head"])
    print(fq.plan(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if args.model is None else 1e-5)

    ids, losses = torch.randint(TINY.vocab_size, (4, 32), device=device), []
    for _ in range(args.steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # .item() would wait for the device in every step
    losses = [loss.item() for loss in losses]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}\n{fq.receipt()}")
    return losses


if __name__ == "__main__":
    main()
