# SPDX-License-Identifier: Apache-2.0
"""The launch scripts for several nodes: two torchrun agents on one machine, and Slurm's commands
replaced by fakes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_quant as fq
import train_lm
from dist_tests import laws
from dist_tests.multi.harness import run_ranks
from fsdp_quant import checkpoint

ROOT = Path(__file__).parents[2]
TINY = (
    "--recipe mxfp8 --replicate 2 --steps 2 --warmup 1 --batch 2 --seq 16"
    " --dim 32 --layers 1 --heads 2 --kv-heads 1 --ffn 64"
).split()


def environment(**changes: str) -> dict[str, str]:
    inherited = {
        k: v
        for k, v in os.environ.items()
        if k not in ("NPROC", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return (
        inherited
        | {"FSDP_QUANT_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | changes
    )


def free_port() -> int:
    """Below those that the system hands out: other tests take many of them before the agents
    listen."""
    for port in itertools.count(20000 + os.getpid() % 9000):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def script(name: str, *arguments: str, **changes: str) -> subprocess.Popen:
    command = ["bash", str(ROOT / "launch" / name), *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


# torchrun's agent lost its store, whose host may leave first; a thread of gloo aborted as it ended
FAULTS_OF_TORCH = "DistNetworkError", "terminate called without an active exception"


def kill(*agents: subprocess.Popen) -> None:
    for agent in agents:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)


@pytest.mark.skipif(not laws.EVERYTHING, reason="20 s; FSDP_QUANT_ALL_PAIRS=1 runs it")
def test_two_agents_train_and_save_with_copies_across_them(tmp_path):
    """If false, a job on two nodes does not meet, shards across copies, or writes no checkpoint.

    Two copies of two shards.
    """
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question. " * 40)
    # again after a fault of torch, whose other agent waits five minutes for the first
    for attempt in range(4):
        # a run that starts at step 0 refuses a folder with checkpoints
        saved = tmp_path / f"run_{attempt}"
        arguments = [
            *TINY,
            "--data",
            str(text),
            "--save",
            str(saved),
            "--plot",
            str(tmp_path / "plot.png"),
        ]
        where = {
            "NNODES": "2",
            "NPROC": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        agents = [script("multinode.sh", *arguments, **where) for _ in range(2)]
        stopped = threading.Timer(110, kill, agents)  # with their workers
        stopped.start()
        outputs = [agent.communicate()[0] for agent in agents]
        stopped.cancel()
        if not any(fault in output for output in outputs for fault in FAULTS_OF_TORCH):
            break
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert sum("4 x cpu, 2 copies" in output for output in outputs) == 1, "\n".join(outputs)
    facts = json.loads((saved / "step_00000002" / "run.json").read_text())
    assert (facts["step"], facts["world"]) == (2, 4)


def test_missing_addresses_are_named():
    """If false, an agent waits for a node that it was not told of."""
    agent = script("multinode.sh", NNODES="2", MASTER_ADDR="")
    output, _ = agent.communicate(timeout=60)
    assert agent.returncode == 1 and "MASTER_ADDR is not set" in output


def test_slurm_starts_one_agent_a_node_at_the_first(tmp_path):
    """If false, nodes of a Slurm job look for each other in different places, or lose the
    arguments."""
    for name, text in (
        ("scontrol", "echo node7; echo node9"),
        ("srun", 'echo "$@"; echo $NNODES $MASTER_ADDR $MASTER_PORT $JOB_ID $FSDP_QUANT_PYTHON'),
    ):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = script(
        "slurm.sbatch",
        "--replicate",
        "2",
        "--data",
        "two words",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_NODELIST="node[7,9]",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_ID="123456",
    )
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    command, facts = output.splitlines()[-2:]
    assert command == "--kill-on-bad-exit=1 bash launch/multinode.sh --replicate 2 --data two words"
    assert facts == f"2 node7 23456 123456 {sys.executable}"


def elastic(folder: Path, *, kill_at: int | None, chance: random.Random) -> str:
    """Train six steps under torchrun, which restarts what is killed behind the checkpoint of a
    step; returns what it printed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
    ]
    command += [
        "--monitor-interval",
        "0.1",
        str(ROOT / "examples" / "train_lm.py"),
        *TINY,
        "--replicate",
        "1",
        "--steps",
        "6",
    ]
    command += [
        "--data",
        str(ROOT / "LICENSE"),
        "--save",
        str(folder),
        "--save-every",
        "1",
        "--plot",
        str(folder.parent / "plot.png"),
    ]
    agent = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    stopped = threading.Timer(250, lambda: os.killpg(agent.pid, signal.SIGKILL))
    stopped.start()
    if kill_at is not None:
        while not (folder / f"step_{kill_at:08d}").exists() and agent.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.2)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        workers = [
            pid
            for pid in map(int, children)
            if b"train_lm" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(chance.choice(workers), signal.SIGKILL)
    output = agent.communicate()[0]
    stopped.cancel()
    assert agent.returncode == 0, output
    return output


def content_of(path: Path) -> dict[str, object]:
    """Everything that a checkpoint holds, by name."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    return {
        key: checkpoint.verification._read_one(path, key, of)
        for key, of in metadata.state_dict_metadata.items()
    }


@pytest.mark.skipif(not laws.EVERYTHING, reason="30 s; FSDP_QUANT_ALL_PAIRS=1 runs it")
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds torchrun's workers in /proc")
def test_a_killed_rank_restarts_from_the_last_checkpoint(tmp_path):
    """If false, a run of which a rank dies loses more than the steps since its last checkpoint, or
    goes on with other weights."""
    chance = random.Random(os.getpid())
    step = chance.randrange(1, 5)
    elastic(tmp_path / "straight", kill_at=None, chance=chance)
    output = elastic(tmp_path / "killed", kill_at=step, chance=chance)
    assert "Signal 9 (SIGKILL)" in output or "exitcode: -9" in output, output
    want, got = (content_of(tmp_path / run / "step_00000006") for run in ("straight", "killed"))
    assert got.keys() == want.keys() and any(
        isinstance(value, torch.Tensor) for value in want.values()
    )
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            laws.assert_same_bytes(got[name], value, f"killed behind step {step}: {name}")
        else:
            assert got[name] == value, f"killed behind step {step}: {name}"


def _resumed(rank: int, world: int, folder: Path) -> None:
    args = train_lm.parse(
        [*TINY, "--replicate", "1", "--data", str(ROOT / "README.md"), "--save", str(folder)]
    )
    _, config, _ = train_lm.prepare(args)
    rates, steps = [], []
    for rate in (torch.tensor(0.25), 0.5):  # as of `fq.graphed`, and a new optimizer's
        model = train_lm.build_model(config, fq.recipes.mxfp8(), args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        if isinstance(rate, torch.Tensor):
            model(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
            optimizer.step()
            train_lm.save_checkpoint(folder, 1, model, optimizer, {})
        else:
            assert train_lm.load_checkpoint(folder / "step_00000001", model, optimizer) == 1
        rates.append(optimizer.param_groups[0]["lr"])
        steps.append(next(iter(optimizer.state.values()))["step"])
    assert rates == [0.25, 0.25] and steps == [1, 1]


def test_a_checkpoint_of_graphed_steps_resumes_in_any_run(tmp_path):
    """If false, what `--graphed --save` wrote is lost: a rate that is a tensor loads into no new
    optimizer."""
    run_ranks(1, _resumed, tmp_path)


def test_a_dry_run_prints_the_plan_and_the_memory_of_each_arm(monkeypatch, capsys):
    """If false, whether a run fits, and what a GPU runs of it, is known when the GPUs are paid
    for."""
    monkeypatch.setattr(fq, "set_gradient_reduction", lambda model, how: None)  # asks all ranks
    held = []
    for ranks in (1, 2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        run = ["--dry-run", "--on", "sm_90a", "--dim", "256", "--layers", "2", "--compare", "bf16"]
        args = train_lm.parse([*run, "--data", str(ROOT / "README.md")])
        arms, config, _ = train_lm.prepare(args)
        train_lm.dry_run(arms, config, args)
        text = capsys.readouterr().out
        assert text.startswith("mxfp8\nfprop") and "\nbf16\nfprop" in text
        assert "on sm_90a" in text and "reference" not in text
        rows = re.findall(r"weights ([\d.]+), .* fsdp ([\d.]+), codes 0.0; .*; with AdamW", text)
        held.append([tuple(map(float, row)) for row in rows])
    (whole, gathered), (of_bf16, gathered_16) = held[0]
    assert whole == of_bf16 and 0 < gathered < gathered_16
    assert abs(whole / 2 - held[1][0][0]) < 0.2  # shards of a rank


def test_each_steps_numbers_are_logged(monkeypatch, tmp_path):
    """If false, a run of --logger tensorboard has no curves, or both arms' in one."""

    class Writer(contextlib.nullcontext):
        def __init__(self, folder: Path):
            super().__init__(self)
            self.folder = folder

        def add_scalar(self, name: str, number: float, step: int) -> None:
            written.setdefault((self.folder.name, name), []).append((step, number))

    written: dict[tuple[str, str], list] = {}
    stub = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    run = [*TINY, "--replicate", "1", "--steps", "2", "--logger", "tensorboard"]
    args = train_lm.parse([*run, "--data", str(ROOT / "README.md"), "--log-dir", str(tmp_path)])
    with pytest.raises(ValueError, match="pip install tensorboard, or drop it"):
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        train_lm.prepare(args)
    args.logger = None
    arms, config, text = train_lm.prepare(args)
    args.logger = "tensorboard"
    threads = torch.get_num_threads()
    train_lm.start_processes(args)
    outcome = train_lm.train("mxfp8/nvfp4", fq.recipes.bf16(), config, text, args)
    dist.destroy_process_group()
    torch.set_num_threads(threads)
    assert written["mxfp8-nvfp4", "loss"] == list(outcome.losses.items())
    assert written["mxfp8-nvfp4", "loss, held out"] == [(2, outcome.validation)]
    assert {name for _, name in written} > {"lr", "tokens/s", "MB gathered"}


def test_help_lists_every_argument(capsys):
    """If false, a user finds two of thirty options."""
    with pytest.raises(SystemExit):
        train_lm.parse(["--on", "sm_90a", "--help"])
    text = capsys.readouterr().out
    assert all(
        train_lm.option(name) in text for name in vars(train_lm.parse([])) if name != "device"
    )


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["--on", "sm_90a"], "--on sm_90a plans for a GPU that need not be here; add --dry-run"),
        (["--dry-run", "--on", "sm_91"], "'sm_91' is no GPU of ours: wanted one of sm_80"),
        (["--replicate", "3"], "--replicate 3 does not divide the 4 processes"),
        (["--graphed", "--grad-accum", "2"], "--graphed makes one graph of a step"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(monkeypatch, arguments: list[str], why: str):
    """If false, the mesh fails on some ranks after others have begun to wait, or half of a step is
    captured."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=why):
        train_lm.prepare(train_lm.parse(arguments))
