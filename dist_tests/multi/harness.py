# SPDX-License-Identifier: Apache-2.0
"""Spawn ranks on gloo, run a function on each, collect results or the first traceback.

With FSDP_QUANT_TEST_DEVICE=cuda in the environment: on NCCL, a GPU a rank, on which tensors are
then made by default; laws that want more ranks than there are GPUs are skipped.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing import connection

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEVICE = os.environ.get("FSDP_QUANT_TEST_DEVICE", "cpu")
# seconds that ranks have to notice that another one failed; NCCL lets them wait for minutes
GRACE = 10.0
on_cpu = pytest.mark.skipif(
    DEVICE != "cpu", reason="emulates a GPU on a CPU, or compares ranks with this process on a CPU"
)
# What ranks would import one by one; torch._dynamo, by the first step of an optimizer, takes longer
# than most laws, and transformers longer still. Without it `torch._dynamo` alone was a third of the
# suite's time: a module that ranks import later is paid for by every rank of every law. What is not
# installed is left out. A rank is a fork of one server: 50 ms of processor time, and modules,
# counters, step and groups as in a fresh process. Ranks that live on would save those 50 ms and
# share all that state. `fsdp_quant` imports its public names at their first use: 0.2 s per rank.
_PRELOAD = [
    "fsdp_quant.public",
    "numpy.random",
    "peft",
    "pytest",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.pattern_matcher",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "dist_tests.multi.nets",
    "dist_tests.single.hopper",
]


def _entry(rank: int, world: int, port: int, fn, args, folder: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
    }
    faulthandler.enable()  # a rank that dies of a signal says where
    torch.set_num_threads(1)
    gc.freeze()  # modules are no garbage: a collection reads what the law made
    # its key has a DTensor's shape and not its local one: a rank would run the graph of another
    torch._functorch.config.enable_autograd_cache = False
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=world, device_id=torch.device("cuda", rank)
        )
    else:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
    try:
        outcome = ("ok", fn(rank, world, *args))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    with open(os.path.join(folder, str(rank)), "wb") as f:
        pickle.dump(outcome, f)
    if outcome[0] == "ok" and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # gloo workers sometimes abort in their destructors


def most_ranks(world: int) -> int:
    """As many, or as there are GPUs: of laws that hold for any number."""
    return world if DEVICE == "cpu" else min(world, torch.cuda.device_count())


def _results(folder: str, ranks: Iterable[int]) -> dict[int, tuple]:
    """What those of these ranks that came to an end have written."""
    found = {}
    for rank in ranks:
        path = os.path.join(folder, str(rank))
        if os.path.exists(path):
            with open(path, "rb") as f:
                found[rank] = pickle.load(f)
    return found


def run_ranks(world: int, fn, *args) -> list:
    """fn(rank, world, *args) on every rank; returns the results by rank. fn must be a module-level
    function.

    Raises AssertionError with the traceback of the first rank that failed of itself.
    """
    if DEVICE == "cuda" and world > torch.cuda.device_count():
        pytest.skip(f"{world} ranks, {torch.cuda.device_count()} GPUs")
    context = mp.get_context("spawn" if DEVICE == "cuda" else "forkserver")
    if DEVICE == "cpu":
        # torch is imported once, each rank is a fork of the server
        context.set_forkserver_preload(_PRELOAD)
    # on a port that no other test is given
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_entry, args=(r, world, store.port, fn, args, folder))
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + 300
        while (alive := [p for p in ranks if p.is_alive()]) and (
            rest := end - time.monotonic()
        ) > 0:
            connection.wait([p.sentinel for p in alive], rest)
            results = _results(folder, [r for r, p in enumerate(ranks) if not p.is_alive()])
            if any(kind == "error" for kind, _ in results.values()):
                end = min(end, time.monotonic() + GRACE)
        died = [
            f"rank {r} of signal {-p.exitcode}"
            for r, p in enumerate(ranks)
            if (p.exitcode or 0) < 0
        ]
        for process in ranks:
            process.kill()
            process.join()
        results = _results(folder, range(world))
    errors = {r: text for r, (kind, text) in results.items() if kind == "error"}
    missing = [r for r in range(world) if r not in results]
    if errors:  # the rank that failed of itself, not one whose peer went away
        rank = min(errors, key=lambda r: ("gloo" in errors[r] or "NCCL" in errors[r], r))
        raise AssertionError(
            "\n".join(
                [f"{who} died" for who in died] + [f"rank {rank} of {world} failed:", errors[rank]]
            )
        )
    assert not missing, f"ranks {missing} of {world} ended without a result; {died}"
    return [results[r][1] for r in range(world)]
