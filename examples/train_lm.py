# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level language model in low precision under stock FSDP2.

    bash launch/train.sh                                      MXFP8
    bash launch/train.sh --compare bf16                       and the same run in bf16
    bash launch/train.sh --forward fp8_block --backward bf16 --data ~/books
    python examples/train_lm.py --recipe nvfp4 --steps 50     one process
    bash launch/train.sh --tp 2                               tensor and sequence parallel in pairs
    python examples/train_lm.py --dry-run --on sm_90a      plan and memory on an H100; no GPU
    NNODES=2 MASTER_ADDR=host bash launch/multinode.sh --replicate 2      on each of two nodes
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_lm.py --save run --save-every 50
                                                              resume from `run` if a process dies

The model and the text are in `language_model.py`.

`build_model` and `train_step` hold all that low precision adds:

    fq.convert(model, recipe)    nn.Linear -> fq.Linear, the names of the parameters unchanged
    cut_over_ranks(model, mesh)  --tp: torch's parallelize_module; activations are gathered as codes
    fully_shard(block)           stock FSDP2, which gathers codes and scales, not bf16
    fq.begin_step(step)          the random key of the step

Shape letters: B sequences, S bytes per sequence.
"""

import argparse
import contextlib
import gc
import importlib.util
import itertools
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module

import fsdp_quant as fq
from language_model import LanguageModel, ModelConfig, Text, read_text

# Defaults of the command line: minutes on two CPU cores, enough work for a GPU.
DEFAULTS = {
    "cpu": {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384, "seq": 128}
    | {"batch": 4, "steps": 160, "lr": 3e-3},
    "cuda": {"dim": 1024, "layers": 8, "heads": 16, "kv_heads": 4, "ffn": 2816, "seq": 1024}
    | {"batch": 8, "steps": 200, "lr": 1e-3},
}

# Training #


@dataclass(frozen=True)
class Outcome:
    """Results of one arm. Losses are in nats per byte, averaged over ranks."""

    label: str
    losses: dict[int, float]  # by step
    bytes_per_element: float  # gathered per step and element of a converted weight
    tokens_per_second: float
    peak_memory: int  # bytes, on rank 0
    plan: str
    receipt: str  # of the training steps
    validation: float

    @property
    def final_loss(self) -> float:
        last = list(self.losses.values())[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


def build_model(config: ModelConfig, recipe: fq.Recipe, args: argparse.Namespace) -> nn.Module:
    """The sharded model, with the same initial values in every arm and world size."""
    torch.manual_seed(args.seed)
    with torch.device("meta") if args.dry_run else contextlib.nullcontext():
        model = LanguageModel(config, recompute=args.checkpoint)
    model = model.to("meta" if args.dry_run else args.device)
    fq.convert(model, recipe, skip=[] if config.tie else ["lm_head"])
    dtype = torch.bfloat16 if args.dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = mesh_of(args)
    if args.tp > 1:
        cut_over_ranks(model, mesh["tp"])
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names if name != "tp")]
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=args.reshard)
    for block, following in itertools.pairwise(model.layers):
        block.set_modules_to_forward_prefetch([following])
    fully_shard(model, mesh=mesh, mp_policy=policy)
    fq.set_gradient_reduction(model, args.gradients)
    return model


def mesh_of(args: argparse.Namespace) -> DeviceMesh:
    """Mesh of copies x shards x tensor parallelism, without axes of size 1. Ranks of a copy are
    consecutive, so that with one copy per node weights are gathered inside nodes."""
    shards = dist.get_world_size() // args.replicate // args.tp
    sizes = {"replicate": args.replicate, "shard": shards, "tp": args.tp}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    kind = torch.device(args.device).type
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def cut_over_ranks(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism over a mesh of one axis: between the GEMMs of a block each
    rank holds a piece of the sequence. The head stays in the compute dtype.
    """
    column, row = fq.parallel.ColwiseParallel, fq.parallel.RowwiseParallel
    norm, cut = fq.parallel.SequenceParallel(), Shard(1)
    for block in model.layers:
        plan = {"attention_norm": norm, "ffn_norm": norm, "gate": column(), "up": column()}
        plan |= {f"attention.{part}": column() for part in "qkv"}
        plan |= {"attention.out": row(output_layouts=cut), "down": row(output_layouts=cut)}
        parallelize_module(block, mesh, plan)
    whole = Replicate()
    outside = {
        "embedding": torch_styles.RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "norm": norm,
        "lm_head": torch_styles.ColwiseParallel(input_layouts=cut, output_layouts=whole),
    }
    parallelize_module(model, mesh, outside)


def data_rank(args: argparse.Namespace) -> int:
    """Ranks of one tensor-parallel group read the same text."""
    return dist.get_rank() // args.tp


def batch_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats.  tokens: [B, S + 1]."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def mean_over_ranks(value: Tensor) -> float:
    """Collective; returns the same number on every rank."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def micro_step(model: nn.Module, optimizer, args) -> Callable[[Tensor, bool], Tensor]:
    """Run forward and backward, and after the last micro-batch the update; returns the loss."""

    def learn(tokens: Tensor, is_last: bool) -> Tensor:
        model.set_requires_gradient_sync(is_last)
        loss = batch_loss(model, tokens) / args.grad_accum
        loss.backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return fq.graphed(learn, model, optimizer) if args.graphed else learn


def train_step(learn: Callable, optimizer, text: Text, step: int, args) -> float:
    """One optimizer step over grad_accum micro-batches; returns their mean loss over all ranks."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # that a CUDA graph reads
            group["lr"].fill_(learning_rate(step, args))
        else:
            group["lr"] = learning_rate(step, args)
    loss_sum = torch.zeros((), device=args.device)
    for micro in range(args.grad_accum):
        fq.begin_step(step, micro_batch=micro, seed=args.seed)
        tokens = text.batch(args.batch, step, micro, data_rank(args)).to(args.device)
        loss_sum += learn(tokens, micro == args.grad_accum - 1)
    return mean_over_ranks(loss_sum)


@torch.no_grad()
def validate(model: nn.Module, text: Text, args: argparse.Namespace) -> float:
    """Mean loss over the held-out windows of all ranks."""
    model.eval()
    batches = text.validation(args.batch, data_rank(args), dist.get_world_size() // args.tp)
    losses = [batch_loss(model, tokens.to(args.device)) for tokens in batches]
    model.train()
    return mean_over_ranks(torch.stack(losses).mean())


def train(label: str, recipe: fq.Recipe, config: ModelConfig, text: Text, args) -> Outcome:
    """Train one arm from its first (or resumed) step to its last, validate and report."""
    fq.inspection.reset_receipt()
    reset_peak_memory()
    model = build_model(config, recipe, args)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    first = load_checkpoint(args.resume, model, optimizer) if args.resume else 0
    learn = micro_step(model, optimizer, args)
    linears = [m for m in model.modules() if isinstance(m, fq.Linear)]
    elements = sum(m.weight.numel() for m in linears) / args.tp  # that a rank gathers
    readers = dist.get_world_size() // args.tp
    step_tokens = args.batch * args.grad_accum * config.seq * readers

    losses, seconds, gathered = {}, [], 0
    with progress(label, first, args.steps) as report, scalars(label, args) as write:
        for step in range(first, args.steps):
            started, gathered_before = time.perf_counter(), fq.receipt().gathered_bytes
            losses[step] = train_step(learn, optimizer, text, step, args)
            gathered = fq.receipt().gathered_bytes - gathered_before
            seconds.append(time.perf_counter() - started)
            speed = f"{step_tokens / seconds[-1]:,.0f} tokens/s"
            report(step, f"loss {losses[step]:.3f}  {speed}  {gathered / 1e6:.2f} MB gathered")
            rates = {"lr": learning_rate(step, args), "tokens/s": step_tokens / seconds[-1]}
            write(step, {"loss": losses[step], "MB gathered": gathered / 1e6, **rates})
            if args.save and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
                facts = run_facts(recipe, config, args)
                save_checkpoint(args.save, step + 1, model, optimizer, facts)
        validation = validate(model, text, args)
        write(args.steps, {"loss, held out": validation})
    timed = seconds[1:] or seconds  # the first step warms up
    return Outcome(
        label=label,
        losses=losses,
        bytes_per_element=gathered / elements,
        tokens_per_second=step_tokens * len(timed) / sum(timed),
        peak_memory=peak_memory(),
        plan=str(fq.plan(model)),
        receipt=str(fq.receipt()),
        validation=validation,
    )


# Checkpoints #


def run_facts(recipe: fq.Recipe, config: ModelConfig, args: argparse.Namespace) -> dict:
    """Settings that a resumed run must share with the run that saved."""
    return {"recipe": str(recipe), **asdict(config), "seed": args.seed}


def full_state(model: nn.Module, optimizer) -> dict:
    """Everything that is saved and loaded, at any world size."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    for group in optimizer_state["param_groups"]:
        group["lr"] = float(group["lr"])  # a tensor where a CUDA graph reads it
    own = fq.steps.TrainingState(model)
    return {"model": model_state, "optimizer": optimizer_state, "train_state": own}


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer, facts: dict) -> None:
    """Write folder/step_N, which has that name once it is complete. Every rank calls it."""
    path = folder / f"step_{step:08d}"
    part = folder / f".{path.name}.part"
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    dist.barrier()
    dcp.save(full_state(model, optimizer), checkpoint_id=part)  # syncs its files
    if dist.get_rank() == 0:
        with fq.checkpoint.replacing(part / "run.json") as mark:
            facts = {"step": step, "world": dist.get_world_size(), **facts}
            mark.write_text(json.dumps(facts, indent=1))
        fq.checkpoint.publish(part, path)
    dist.barrier()


def checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in folder by step; folder may be one itself."""
    marks = [folder / "run.json", *folder.glob("step_*/run.json")]
    return {json.loads(m.read_text())["step"]: m.parent for m in marks if m.is_file()}


def find_checkpoint(folder: Path, facts: dict, steps: int) -> tuple[int, Path]:
    """Step and path of the last checkpoint in folder.

    Raises ValueError if there is none, or another recipe, model or seed wrote it.
    """
    found = checkpoints(folder)
    if not found:
        raise ValueError(f"--resume {folder} holds no step_*/run.json; give what --save was given")
    step, path = max(found.items())
    saved = json.loads((path / "run.json").read_text())
    for name, value in facts.items():
        if saved.get(name) != value:
            raise ValueError(
                f"--resume {path} was trained with {name} {saved.get(name)}, got {value};"
                " resume with the former, or start a new run without --resume"
            )
    if step >= steps:
        raise ValueError(f"--resume {path} is at step {step}, got --steps {steps}; give more")
    return step, path


def load_checkpoint(path: Path, model: nn.Module, optimizer) -> int:
    """Load the checkpoint into model and optimizer; returns the next step."""
    state = full_state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return json.loads((path / "run.json").read_text())["step"]


# Reports #


@contextlib.contextmanager
def progress(label: str, first: int, last: int) -> Iterator[Callable[[int, str], None]]:
    """Yield what rank 0 reports a step with: a bar on a terminal, else a line per tenth of the
    run."""
    every, prints = max(1, (last - first) // 10), dist.get_rank() == 0

    def print_line(step: int, facts: str) -> None:
        if prints and ((step + 1) % every == 0 or step + 1 == last):
            print(f"{label}  step {step + 1}/{last}  {facts}", flush=True)

    if not (prints and sys.stdout.isatty() and importlib.util.find_spec("rich")):
        yield print_line
        return
    from rich.progress import Progress, TimeRemainingColumn

    columns = [*Progress.get_default_columns()[:3], "{task.fields[facts]}", TimeRemainingColumn()]
    with Progress(*columns) as bar:
        task = bar.add_task(label, total=last, completed=first, facts="")
        yield lambda step, facts: bar.update(task, completed=step + 1, facts=facts)


@contextlib.contextmanager
def scalars(label: str, args: argparse.Namespace) -> Iterator[Callable[[int, dict], None]]:
    """Yield what rank 0 writes a step's numbers with: --logger's file of an arm, or nothing."""
    if args.logger is None or dist.get_rank() > 0:
        yield lambda step, numbers: None
        return
    from torch.utils.tensorboard import SummaryWriter

    def write(step: int, numbers: dict) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    with SummaryWriter(args.log_dir / label.replace("/", "-")) as writer:
        yield write


def reset_peak_memory() -> None:
    """Reset the peak, so that arms do not share one. On CUDA, and on the CPU under Linux."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Bytes: allocated by torch on CUDA, resident in this process elsewhere."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def print_table(outcomes: list[Outcome]) -> None:
    """Print one line per arm: mean loss of the last tenth of the steps, held-out loss, its gap to
    the compared arm, bytes gathered per weight element and step."""
    rows = [["recipe", "loss", "held out", "gap", "B/weight/step", "tokens/s", "peak MiB"]]
    for arm in outcomes:
        gap = f"{arm.validation - outcomes[-1].validation:+.4f}" if len(outcomes) > 1 else ""
        losses = [f"{arm.final_loss:.4f}", f"{arm.validation:.4f}", gap]
        speed = f"{arm.tokens_per_second:,.0f}"
        memory = f"{arm.peak_memory / 2**20:,.0f}"
        rows.append([arm.label, *losses, f"{arm.bytes_per_element:.3f}", speed, memory])
    width = max(len(row[0]) for row in rows)
    for label, *cells in rows:
        print(f"{label:<{width}}" + "".join(f"{cell:>15}" for cell in cells))


def plot(outcomes: list[Outcome], path: Path) -> None:
    """Plot the loss curves of all arms as a PNG; validation losses are dashed."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path} is not drawn: matplotlib is not installed")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for outcome in outcomes:
        (line,) = axes.plot(outcome.losses.keys(), outcome.losses.values(), label=outcome.label)
        axes.axhline(outcome.validation, color=line.get_color(), linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats a byte (dashed: held-out text)")
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"loss curves: {path}")


# Command line #


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the sizes that depend on the device filled in."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first = argparse.ArgumentParser(add_help=False)  # what defaults depend on
    first.add_argument("--on", metavar="GPU", help="plan for a GPU that need not be here: sm_90a")
    elsewhere = first.parse_known_args(argv)[0].on
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[first])
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print the plan and the memory, and do not train")
    add("--data", type=Path, help="file or folder, its first 64 MiB; default: Python's own sources")
    names = ", ".join(fq.recipes.names())
    add("--recipe", help=f"one recipe for both directions, default mxfp8: {names}")
    add("--forward", help="format family of the forward pass, default mxfp8")
    add("--backward", help="format family of the backward pass, default mxfp8")
    add("--compare", metavar="RECIPE", help="train a second arm with this recipe, such as bf16")
    for name, value in DEFAULTS["cuda" if elsewhere else device].items():
        add(option(name), type=type(value), default=value, help=f"default here: {value}")
    add("--tie", action="store_true", help="the head shares the embedding's weight")
    add("--replicate", type=int, default=1, help="copies of the shards (HSDP), default 1")
    add(
        "--tp", type=int, default=1, help="ranks that share each layer (tensor parallel), default 1"
    )
    add("--grad-accum", type=int, default=1, help="micro-batches in a step, default 1")
    add("--warmup", type=int, default=20, help="steps of rising learning rate, default 20")
    add("--seed", type=int, default=0)
    add("--checkpoint", action="store_true", help="recompute the activations of each block")
    add("--graphed", action="store_true", help="each step as one CUDA graph (fq.graphed)")
    formats = "fp32", "bf16", "fp8_1x128", "mxfp8", "nvfp4"
    add("--gradients", choices=formats, default="fp32", help="how they are sent to their owners")
    yes_no = argparse.BooleanOptionalAction
    add("--reshard", action=yes_no, default=True, help="free gathered weights after the forward")
    add("--dtype", choices=["auto", "fp32", "bf16"], default="auto", help="of the computation")
    add("--save", type=Path, metavar="DIR", help="write checkpoints of the first arm")
    add("--save-every", type=int, help="steps between checkpoints; default: only the last step")
    add("--resume", type=Path, metavar="DIR", help="go on from the last checkpoint in DIR")
    add("--logger", choices=["tensorboard"], help="write each step's numbers, by arm, to --log-dir")
    add("--log-dir", type=Path, default=Path("runs"), help="folder of --logger, default runs")
    add("--plot", type=Path, default=Path("train_lm.png"), help="PNG of the loss curves")
    args = parser.parse_args(argv)
    args.device = device
    if args.dtype == "auto":
        fast = elsewhere or device == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        args.dtype = "bf16" if fast else "fp32"
    return args


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def prepare(args: argparse.Namespace) -> tuple[dict[str, fq.Recipe], ModelConfig, Text]:
    """Check all arguments, from values that all ranks share, before any collective.

    returns:  the arms by label, the model's sizes, the text.
    Raises ValueError.
    """
    for name, value in vars(args).items():
        if type(value) in (int, float) and value <= 0 and name not in ("seed", "warmup"):
            raise ValueError(f"{option(name)} is {value}; give a positive number")
    config = ModelConfig(**{field.name: getattr(args, field.name) for field in fields(ModelConfig)})
    if args.recipe and (args.forward or args.backward):
        raise ValueError("--recipe names both directions; drop it, or --forward and --backward")
    if args.graphed and args.grad_accum > 1:
        raise ValueError("--graphed makes one graph of a step; drop it, or --grad-accum")
    if args.logger and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--logger tensorboard: pip install tensorboard, or drop it")
    if args.on and not args.dry_run:
        raise ValueError(f"--on {args.on} plans for a GPU that need not be here; add --dry-run")
    fq.is_native("bf16", args.on)  # refuses a GPU that it does not know
    if args.compare and args.resume:
        raise ValueError("--compare starts both arms at step 0; drop it, or --resume")
    arms = {}
    name = args.recipe or "mxfp8"
    if args.forward or args.backward:
        name = f"{args.forward or 'mxfp8'}/{args.backward or 'mxfp8'}"
    arms[name] = fq.recipes.by_name(name)
    (recipe,) = arms.values()
    if args.compare:
        arms[args.compare] = fq.recipes.by_name(args.compare)
        if len(arms) == 1:
            raise ValueError(f"--compare {args.compare} is the first arm's recipe; name another")
    world = int(os.environ.get("WORLD_SIZE", 1))
    check_ranks(args, config, world)
    text = Text(read_text(args.data), config.seq, args.seed)
    saved, first = checkpoints(args.save) if args.save else {}, 0
    if saved and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        args.resume = args.save  # a rank of this run died
    if args.resume:
        facts = run_facts(recipe, config, args)
        first, args.resume = find_checkpoint(args.resume, facts, args.steps)
    if not args.plot.parent.is_dir():
        raise ValueError(f"--plot {args.plot}: there is no folder {args.plot.parent}; make it")
    if args.save_every and not args.save:
        raise ValueError("--save-every needs a folder; give --save DIR")
    args.save_every = args.save_every or args.steps
    if max(saved, default=0) > first:
        raise ValueError(
            f"--save {args.save} holds checkpoints from beyond step {first}, where this run starts;"
            f" give another folder, or --resume {args.save}"
        )
    return arms, config, text


def check_ranks(args: argparse.Namespace, config: ModelConfig, world: int) -> None:
    """Raise ValueError for copies and tensor parallelism that the processes or sizes do not
    allow."""
    for name in ("tp", "replicate"):
        if world % getattr(args, name):
            raise ValueError(
                f"--{name} {getattr(args, name)} does not divide the {world} processes; give a"
                " divisor, such as the number of nodes"
            )
    if world % (args.replicate * args.tp):
        raise ValueError(
            f"--replicate x --tp do not divide the {world} processes; give smaller ones"
        )
    for name in ("kv_heads", "ffn", "seq"):
        if getattr(config, name) % args.tp:
            raise ValueError(
                f"--tp {args.tp} does not divide {option(name)} {getattr(config, name)}; give a"
                " divisor, or change that"
            )
    if config.tie and args.tp > 1:
        raise ValueError("--tie is for models that --tp does not cut; drop one of them")


def start_processes(args: argparse.Namespace) -> None:
    """Join the group that torchrun describes, or create a group of one."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if args.device == "cuda":
        args.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(args.device)
        group = dict(backend="nccl", device_id=args.device)
    else:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        group = dict(backend="gloo")
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://"))
        # torchrun keeps its store over restarts, with the addresses of dead processes.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    else:
        store, rank, world = dist.TCPStore("127.0.0.1", 0, is_master=True), 0, 1
    dist.init_process_group(store=store, rank=rank, world_size=world, **group)


def dry_run(arms: dict[str, fq.Recipe], config: ModelConfig, args: argparse.Namespace) -> None:
    """Print the plan of each arm, from models on the meta device, and what a rank holds."""
    for label, recipe in arms.items():
        model = build_model(config, recipe, args)
        plan = fq.plan(model, on=args.on or args.device, tokens=args.batch * config.seq)
        if dist.get_rank() == 0:
            print(f"{label}\n{plan}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    args = parse()
    try:
        arms, config, text = prepare(args)
    except ValueError as error:
        sys.exit(f"error: {error}")
    start_processes(args)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} x {args.device}, {args.replicate} copies,"
            f" what is not quantized in {args.dtype};"
            f" {len(text.train):,} bytes to train on, {len(text.held_out):,} held out"
        )
    if args.dry_run:
        dry_run(arms, config, args)
        return
    outcomes = []
    for label, recipe in arms.items():
        outcomes.append(train(label, recipe, config, text, args))
        args.save = None  # only the first arm is saved
    if dist.get_rank() == 0:
        print(outcomes[0].plan, outcomes[0].receipt, sep="\n")
        print_table(outcomes)
        plot(outcomes, args.plot)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
