"""Two network namespaces joined by a link of 1 Gbit/s, which can be taken down: two hosts on one machine."""

import ctypes
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.203.0.1", "10.203.0.2")
LINK_BITS_PER_SECOND = 1e9
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Namespaces:
    """The names of both namespaces and of the link's two ends."""

    names: tuple[str, str]
    devices: tuple[str, str] = ("hb-a", "hb-b")

    def enter(self, side: int) -> None:
        """Moves this process's only thread into a namespace: sockets it makes from now on are there."""
        with open(f"/run/netns/{self.names[side]}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def set_link(self, state: str) -> None:
        """Takes the link "up" or "down"."""
        _run(f"ip -n {self.names[0]} link set {self.devices[0]} {state}")

    def set_gbps(self, gbps: float) -> None:
        """Shapes both ways of the link, with a queue that loses nothing.

        Packets are of 16 KiB, and the token bucket holds one, or what a late timer would lose. One that is larger than the
        bucket would be cut into frames by the cores that compute, which is a card's work (four times the cores' time for a
        message); and what a larger bucket holds passes at once, 80 of the 262 KB of a message.
        """
        bucket = max(20_000, round(75_000 * gbps))  # bytes: 0.6 ms
        for name, device in zip(self.names, self.devices, strict=True):
            _run(f"ip -n {name} link set dev {device} gso_max_size 16384")
            shape = f"tbf rate {round(gbps * 1e6)}kbit burst {bucket} limit 16mb"
            _run(f"ip netns exec {name} tc qdisc replace dev {device} root {shape}")

    def iperf3(self, seconds: int) -> tuple[float, float] | None:
        """Bits of payload a second that iperf3 carries from the first to the second and back, both at once; None
        without iperf3."""
        if shutil.which("iperf3") is None:
            return None
        near, far = (f"ip netns exec {name} iperf3" for name in self.names)
        server = subprocess.Popen(f"{far} -s -1".split(), stdout=subprocess.DEVNULL)
        try:
            time.sleep(0.5)  # until it listens
            said = json.loads(_run(f"{near} -c {ADDRESSES[1]} --bidir -t {seconds} -J"))["end"]
        finally:
            server.kill()
            server.wait()
        return said["sum_received"]["bits_per_second"], said["sum_received_bidir_reverse"]["bits_per_second"]

    def sent_bytes(self) -> tuple[int, int]:
        """What the link has carried from each side, as the kernel's token bucket counts it, headers too."""
        return tuple(
            json.loads(_run(f"ip netns exec {name} tc -s -j qdisc show dev {device}"))[0]["bytes"]
            for name, device in zip(self.names, self.devices, strict=True)
        )


def why_no_namespaces() -> str | None:
    """What this machine lacks for them, or None."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (Debian: iproute2)"
    name = f"hethub-probe-{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"needs network namespaces ({probe.stderr.strip()})" if probe.returncode else None


@contextmanager
def namespaces(prefix: str) -> Iterator[Namespaces]:
    """The namespaces, and nothing left of them behind the block."""
    made = Namespaces((f"{prefix}-a", f"{prefix}-b"))
    commands = [f"ip netns add {name}" for name in made.names]
    commands += [
        f"ip link add {made.devices[0]} netns {made.names[0]} type veth peer name {made.devices[1]} netns {made.names[1]}"
    ]
    for name, device, address in zip(made.names, made.devices, ADDRESSES, strict=True):
        commands += [
            f"ip -n {name} link set lo up",
            f"ip -n {name} addr add {address}/24 dev {device}",
            f"ip -n {name} link set {device} up",
            f"ip netns exec {name} tc qdisc add dev {device} root tbf rate 1gbit burst 256kb latency 50ms",
        ]
    try:
        for command in commands:
            _run(command)
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout
