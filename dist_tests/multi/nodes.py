# SPDX-License-Identifier: Apache-2.0
"""Nodes of a cluster as network namespaces of one machine, with a slow link between them that loses
packets and may go down.

Each node has a network, a host name and /etc/hosts of its own. A thread of this process carries
frames between the nodes' TAP devices: tc's netem would do, but many kernels lack it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MTU = 9000
HOSTS = Path("/etc/netns")  # `ip netns exec` shows files of NAME/ in here as those of /etc


def unsupported_reason() -> str | None:
    """None where nodes can be made; else the reason."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        return "network namespaces need root, and iproute2, unshare and hostname"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    name = f"fqtry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


class Nodes:
    """`with Nodes(2) as nodes: nodes.run(0, ["bash", ...])`; nodes are called node0, node1, ...

    delay:  seconds that a frame takes. loss: share of frames that never arrive, drawn by a seed.
    """

    def __init__(self, count: int, delay: float = 0.005, loss: float = 0.01):
        self.names = [f"fq{os.getpid()}n{i}" for i in range(count)]
        self.delay, self.loss, self.is_up, self.carried, self.lost = delay, loss, True, 0, 0
        self._taps: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Nodes:
        try:
            for i in range(len(self.names)):
                self._make(i)
        except BaseException:
            self._unmake()
            raise
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        self._thread.join()
        self._unmake()

    def _make(self, i: int) -> None:
        name = self.names[i]
        ip("netns", "add", name)
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._taps.append(tap)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
        ip("link", "set", name, "netns", name)
        for command in (
            f"addr add 10.77.0.{i + 1}/24 dev {name}",
            f"link set {name} mtu {MTU} up",
            "link set lo up",
        ):
            ip("-n", name, *command.split())
        folder = HOSTS / name
        folder.mkdir(parents=True)
        lines = [
            "127.0.0.1 localhost",
            *(f"10.77.0.{j + 1} node{j}" for j in range(len(self.names))),
        ]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _unmake(self) -> None:
        for tap in self._taps:
            os.close(tap)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(HOSTS / name, ignore_errors=True)

    def run(self, i: int, command: list[str], **options) -> subprocess.Popen:
        """Start a command on a node, in a session of its own."""
        inside = ["unshare", "--uts", "sh", "-c", f'hostname node{i}; exec "$@"', "sh", *command]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[i], *inside], start_new_session=True, **options
        )

    @contextlib.contextmanager
    def link_down(self):
        """No frame arrives inside."""
        self.is_up = False
        try:
            yield
        finally:
            self.is_up = True

    def _carry(self) -> None:
        """Deliver each frame to the other nodes, `delay` later."""
        draw, waiting = random.Random(0), deque()
        while not self._ended.is_set():
            until = waiting[0][0] - time.monotonic() if waiting else 0.1
            ready = select.select(self._taps, [], [], max(0.0, min(until, 0.1)))[0]
            for tap in ready:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        frame = os.read(tap, MTU + 64)
                        if self.is_up and draw.random() >= self.loss:
                            waiting.append((time.monotonic() + self.delay, tap, frame))
                            self.carried += 1
                        else:
                            self.lost += 1
            while waiting and waiting[0][0] <= time.monotonic():
                _, source, frame = waiting.popleft()
                for tap in self._taps:
                    if tap != source:
                        # a queue that is full drops it, as a switch does
                        with contextlib.suppress(OSError):
                            os.write(tap, frame)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
