"""Fine-tune a language model with transformers' Trainer, in low precision and in bf16 beside it.

    python examples/finetune.py                     LoRA over a base of frozen codes
    python examples/finetune.py --tune full         every weight trains
    python examples/finetune.py --recipe nvfp4 --model FOLDER    a base that `save_pretrained` wrote

Without --model the base is a Llama whose tokens are bytes, which this script trains first, on
sources of the standard library. What it is tuned on is prose: the Python reference, as `pydoc` has
it. docs/finetuning.md explains each step.
"""

import argparse
import copy
import sysconfig
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PrinterCallback, Trainer, TrainingArguments,
)

import fsdp_quant as fq

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def rows(ids: Tensor, count: int, length: int = 128) -> list[dict[str, Tensor]]:
    """`count` windows of `length` tokens, spread over the text, in random order."""
    starts = torch.linspace(0, len(ids) - length, count).long()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids[s : s + length], "labels": ids[s : s + length]} for s in starts[order]]


def train(model: nn.Module, ids: Tensor, steps: int, lr: float, callbacks: list) -> dict:
    """Losses by step, and the loss of the last twentieth of the text, which nothing is trained on."""
    cut = len(ids) * 19 // 20
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_steps": steps, "learning_rate": lr, "warmup_steps": steps // 10, "bf16": True,
                   "per_device_train_batch_size": 8, "lr_scheduler_type": "cosine", "logging_steps": 5}
        quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True,
                 "use_cpu": not torch.cuda.is_available()}
        trainer = Trainer(
            model, TrainingArguments(folder, **options, **quiet), train_dataset=rows(ids[:cut], 8 * steps),
            eval_dataset=rows(ids[cut:], 32), callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        held_out = trainer.evaluate()["eval_loss"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"step": [e["step"] for e in logged], "loss": [e["loss"] for e in logged], "held out": held_out}


def tune(base: nn.Module, ids: Tensor, args: argparse.Namespace, recipe: str) -> dict:
    """Train a copy of the base; `train`'s losses, and bytes per linear weight while it trains."""
    model, callbacks, lr = copy.deepcopy(base), [], args.lr or (1e-3 if args.tune == "full" else 5e-3)
    if args.tune == "full":
        callbacks = [fq.integrations.transformers.Callback(recipe, skip=["lm_head"])]
    else:
        fq.convert(model.bfloat16(), recipe, skip=["lm_head"]).requires_grad_(False)
        if recipe != "bf16":
            fq.freeze(model)  # from here on the base is its codes
        model = get_peft_model(model, LoraConfig(**LORA))
    torch.manual_seed(0)
    found = train(model, ids, args.steps, lr, callbacks)
    weights = [module.weight for module in model.modules() if isinstance(module, fq.Linear)]
    return found | {"bytes": sum(map(held, weights)) / sum(w.numel() for w in weights)}


def held(weight: Tensor) -> int:
    """Bytes of a weight, of frozen ones those of its codes and scales."""
    if not isinstance(weight, fq.QuantizedTensor):
        return weight.nbytes
    storages = {id(s): s for s in (weight.rowwise, weight.columnwise) if s is not None}
    return sum(t.nbytes for s in storages.values() for t in s.buffers().values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune in low precision, and in bf16 beside it.")
    parser.add_argument("--tune", choices=["lora", "full"], default="lora")
    parser.add_argument("--recipe", choices=fq.recipes.names(), nargs="+", default=["mxfp8", "nvfp4"])
    parser.add_argument("--model", help="folder of a transformers model, with its tokenizer")
    parser.add_argument("--base-steps", type=int, default=300, help="of the base, without --model")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, help="default: 0.001, with LoRA 0.005")
    parser.add_argument("--plot", default="finetune.png")
    args = parser.parse_args()
    torch.manual_seed(0)
    prose = "".join(topics.values())
    if args.model:
        base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        ids = torch.tensor(AutoTokenizer.from_pretrained(args.model)(prose).input_ids)
    else:
        code = b"".join(p.read_bytes() for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
        base = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **heads), dtype=torch.float32)
        train(base, torch.tensor(list(code[: 4 << 20])), args.base_steps, 3e-3, [])
        ids = torch.tensor(list(prose.encode()))
    print(f"{args.tune}, {args.steps} steps\n{'recipe':<12} {'held out':>9} {'bytes/weight':>13}")
    for recipe in ("bf16", *args.recipe):
        run = tune(base, ids, args, recipe)
        print(f"{recipe:<12} {run['held out']:9.4f} {run['bytes']:13.3f}", flush=True)
        plt.plot(run["step"], run["loss"], label=recipe)
    plt.xlabel("step")
    plt.ylabel("loss (nats per token)")
    plt.legend()
    plt.savefig(args.plot, dpi=100)


if __name__ == "__main__":
    main()
