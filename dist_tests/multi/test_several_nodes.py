# SPDX-License-Identifier: Apache-2.0
"""Jobs over several nodes, which are network namespaces of this machine: slow links, losses, an
outage, a node that never comes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dist_tests import laws
from dist_tests.multi.nodes import Nodes, unsupported_reason
from dist_tests.multi.test_launch import ROOT, TINY, environment, script

WHY_NOT = unsupported_reason()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
LIMIT = 240  # seconds of one job
OUTAGE = 5.0


def agent(nodes: Nodes, i: int, *arguments: str, **changes: str) -> subprocess.Popen:
    """launch/multinode.sh on one node."""
    command = ["bash", str(ROOT / "launch" / "multinode.sh"), *arguments]
    where = {
        "NNODES": str(len(nodes.names)),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29501",
        "NPROC": "1",
    } | changes
    started = nodes.run(
        i,
        command,
        cwd=ROOT,
        env=environment(**where),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(LIMIT, functools.partial(stop, started))
    timer.daemon = True
    timer.start()
    return started


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def weights(folder: Path, path: Path) -> dict:
    """What a checkpoint holds of the model, whole."""
    dcp_to_torch_save(folder / "step_00000004", path)
    return torch.load(path, weights_only=False)["model"]


# Copies per job, processes per node.
@pytest.mark.skipif(not laws.EVERYTHING, reason="45 s; FSDP_QUANT_ALL_PAIRS=1 runs it")
@pytest.mark.parametrize("copies, each", [(1, 1), (2, 2)], ids=lambda n: str(n))
def test_a_job_over_slow_links_has_the_bits_of_one_machine(tmp_path, copies: int, each: int):
    """If false, a slow link that loses packets, or one that is down for seconds, changes training
    or ends it."""
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question. " * 40)
    tiny = [
        *TINY,
        "--steps",
        "4",
        "--replicate",
        str(copies),
        "--data",
        str(text),
        "--plot",
        str(tmp_path / "plot.png"),
    ]
    with Nodes(2) as nodes:
        agents = [
            agent(nodes, i, *tiny, "--save", str(tmp_path / "nodes"), NPROC=str(each))
            for i in range(2)
        ]
        other = threading.Thread(target=agents[1].communicate)
        other.start()
        said, outage = [], 0.0
        for line in agents[0].stdout:
            said.append(line)
            if "step 1/4" in line:
                with nodes.link_down():
                    time.sleep(OUTAGE)
                began = time.monotonic()
            if "step 4/4" in line:
                outage = time.monotonic() - began
        other.join()
        assert [a.wait() for a in agents] == [0, 0], "".join(said)
        assert nodes.lost > 0 and nodes.carried > 100 and outage > 0, (nodes.lost, nodes.carried)
    one = script("train.sh", *tiny, "--save", str(tmp_path / "one"), NPROC=str(2 * each))
    output, _ = one.communicate(timeout=LIMIT)
    assert one.returncode == 0, output
    got, want = (weights(tmp_path / name, tmp_path / f"{name}.pt") for name in ("nodes", "one"))
    assert got.keys() == want.keys() and len(got) > 5
    for name, tensor in want.items():
        laws.assert_same_bytes(got[name], tensor, name)


def test_a_node_that_never_comes_is_missed_in_time():
    """If false, a job waits for ever, or ends without saying that a node is missing."""
    with Nodes(2) as nodes:
        alone = agent(nodes, 0, *TINY, JOIN_TIMEOUT="3")
        output, _ = alone.communicate(timeout=LIMIT)
    assert alone.returncode == 1
    assert "error: not all of 2 nodes came to node0:29501 within 3 s" in output.splitlines()[-1], (
        output
    )
