# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a language model with transformers' Trainer, in low precision and in bf16.

    python examples/finetune.py                     LoRA over a base of frozen codes
    python examples/finetune.py --tune full         train every weight
    python examples/finetune.py --recipe nvfp4 --model FOLDER    a base that `save_pretrained` wrote
    python examples/finetune.py --data FILE                      your text, or a folder of it

Without --model the base is a byte-level Llama, which this script first trains on sources of the
standard library. It is then fine-tuned on --data, or on prose, the Python reference in `pydoc`.
docs/finetuning.md explains each step.
"""

import argparse
import copy
import sys
import sysconfig
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import fsdp_quant as fq
from language_model import read_text

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH = 128  # tokens of a row
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def rows(ids: Tensor, count: int, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """`count` windows of `length` tokens, spread over the text, in random order."""
    starts = torch.linspace(0, len(ids) - length, count).long()
    starts = starts[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    return [{key: ids[s : s + length] for key in ("input_ids", "labels")} for s in starts]


def train(model: nn.Module, ids: Tensor, steps: int, lr: float, *callbacks) -> dict:
    """Losses by step, and the loss on the held-out last twentieth of the text."""
    cut = len(ids) * 19 // 20
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=lr,
            warmup_steps=steps // 10,
            bf16=True,
            per_device_train_batch_size=8,
            lr_scheduler_type="cosine",
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=rows(ids[:cut], 8 * steps),
            eval_dataset=rows(ids[cut:], 32),
            callbacks=list(callbacks),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        held_out = trainer.evaluate()["eval_loss"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"curve": [(e["step"], e["loss"]) for e in logged], "held out": held_out}


def tune(base: nn.Module, ids: Tensor, how: str, recipe: str, steps: int) -> dict:
    """Train a copy of the base; returns `train`'s losses and the bytes per linear weight."""
    model = copy.deepcopy(base)
    if how == "full":
        callback = fq.integrations.transformers.Callback(recipe, skip=["lm_head"])
        found = train(model, ids, steps, 1e-3, callback)
    else:
        fq.convert(model.bfloat16(), recipe, skip=["lm_head"]).requires_grad_(False)
        if recipe != "bf16":
            fq.freeze(model)  # from now on the base is stored as codes
        torch.manual_seed(0)  # of the adapters
        found = train(get_peft_model(model, LoraConfig(**LORA)), ids, steps, 5e-3)
    weights = [module.weight for module in model.modules() if isinstance(module, fq.Linear)]
    return found | {"bytes": sum(map(bytes_of, weights)) / sum(w.numel() for w in weights)}


def bytes_of(weight: Tensor) -> int:
    """Bytes of a weight; of a frozen one, bytes of the codes and scales that it keeps."""
    if not isinstance(weight, fq.numerics.QuantizedTensor):
        return weight.nbytes
    sides = {id(s): s.buffers() for s in (weight.rowwise, weight.columnwise) if s is not None}
    return sum(tensor.nbytes for side in sides.values() for tensor in side.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tune", choices=["lora", "full"], default="lora")
    parser.add_argument("--recipe", nargs="+", default=["mxfp8", "nvfp4"], help="names of recipes")
    parser.add_argument("--model", help="folder of a transformers model and its tokenizer")
    parser.add_argument("--data", type=Path, help="text file or folder to tune on, at most 64 MiB")
    parser.add_argument("--base-steps", type=int, default=300, help="of the base, without --model")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--plot", default="finetune.png")
    args = parser.parse_args()
    torch.manual_seed(0)
    try:
        for name in args.recipe:
            fq.recipes.by_name(name)
        text = bytes(read_text(args.data)) if args.data else "".join(topics.values()).encode()
    except ValueError as error:
        sys.exit(f"error: {error}")
    if args.model:
        base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        ids = torch.tensor(
            AutoTokenizer.from_pretrained(args.model)(text.decode(errors="replace")).input_ids
        )
    else:
        ids, sources = torch.tensor(list(text)), Path(sysconfig.get_path("stdlib"))
        code = b"".join(path.read_bytes() for path in sorted(sources.glob("*.py")))[: 4 << 20]
        base = transformers.LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES, **HEADS))
    if len(ids) < 20 * LENGTH:  # a twentieth is held out
        sys.exit(f"error: the text has {len(ids):,} tokens; give at least {20 * LENGTH:,}")
    if not args.model:
        train(base, torch.tensor(list(code)), args.base_steps, 3e-3)
    print(f"{args.tune}, {args.steps} steps\n{'recipe':<12} {'held out':>9} {'bytes/weight':>13}")
    for recipe in ("bf16", *args.recipe):
        run = tune(base, ids, args.tune, recipe, args.steps)
        print(f"{recipe:<12} {run['held out']:9.4f} {run['bytes']:13.3f}", flush=True)
        plt.plot(*zip(*run["curve"]), label=recipe)
    plt.xlabel("step")
    plt.ylabel("loss (nats per token)")
    plt.legend()
    plt.savefig(args.plot, dpi=80)


if __name__ == "__main__":
    main()
