"""Pods as processes of this machine: the containers of a manifest, run without Kubernetes.

Secrets are folders of the pod's /tmp, as a kubelet makes them: keys are links into a folder that can be replaced. In
commands and variables these paths replace the mount paths.

Each pod has its own namespaces of network, mounts and processes, and its first process collects orphans as a pod's
does; /tmp is the pod's own. All containers of a pod share its processes here, as the head's do. Ray's command is the
one that KubeRay 1.7 makes of `rayStartParams`. Not simulated: image, limits, users, read-only root.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self

import psutil

from bench.harness.hosts import Network, hosts, obstacle
from longleaf.config import cache_folder, embedded_model
from tests.support.manifests.pods import Pod
from tests.support.tools import lacks

Document = dict[str, Any]
Secrets = Mapping[str, Mapping[str, bytes]]
"""The content of each Secret, by name and key."""
NO_SECRETS: Secrets = {}
Names = Mapping[str, str]
"""Addresses by the names of Services."""
NO_NAMES: Names = {}
NO_PROCESSES: Mapping[str, int] = {}
NAMESPACE = "longleaf"
TOKEN = "a token of the cluster"
PAUSE = """
set -e
folder=$1
shift
for path; do
  mkdir --parents "$folder/${path#/tmp/}"
  mount --bind "$path" "$folder/${path#/tmp/}"
done
mount --rbind "$folder" /tmp
mount --bind /tmp/.hosts /etc/hosts
sleep infinity & wait
"""
"""Script of a pod's first process: a folder becomes /tmp, except for the paths that follow it."""
FILES_LIMIT = 65536
SECONDS = 60.0


def ray_command(pod: Pod, parameters: dict[str, str], head: str | None) -> list[str]:
    """How KubeRay starts Ray in a pod's first container; `head` is the address of the head's pod, for others."""
    given = {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365", "block": "true"} | parameters
    given |= {} if head is None else {"address": f"{head}:6379"}
    reported = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in sorted(given.items())]
    start = "ray start --head" if head is None else "ray start"
    return ["/bin/bash", "-c", "--", f"ulimit -n {FILES_LIMIT}; {start} {' '.join(reported)}"]


def write_secret(folder: Path, content: Mapping[str, bytes]) -> None:
    """Creates the folder of a Secret, or replaces its content atomically."""
    version = f"..v{len(list(folder.glob('..v*')))}"
    (folder / version).mkdir(parents=True)
    for key, data in content.items():
        (folder / version / key).write_bytes(data)
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(f"..data/{key}")
    (folder / "..next").symlink_to(version)
    (folder / "..next").rename(folder / "..data")


def _sleeps(process: psutil.Process) -> bool:
    """Whether this is the process that keeps a pod's first process waiting."""
    try:
        return "infinity" in process.cmdline()
    except psutil.Error:  # it has just ended, as `mount` does
        return False


def install_folders_in_tmp() -> list[str]:
    """Folders below /tmp that a pod needs: Python, the checkout, caches."""
    root = Path(__file__).resolve().parents[3]
    folders = {root, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), cache_folder().parent.resolve()}
    return [str(each) for each in folders if Path("/tmp") in each.parents and folders.isdisjoint(each.parents)]


@contextmanager
def placing(num_hosts: int, names: Mapping[str, int] = NO_PROCESSES) -> Iterator["Place"]:
    """Makes pods on hosts, whose Services have these names; in each runs nothing yet. `names` gives a host's number."""
    if reason := obstacle():
        lacks(reason)
    with ExitStack() as stack:
        network = stack.enter_context(hosts(num_hosts))
        known = {name: network.addresses[host] for name, host in names.items()}

        def enter(pod: Pod, host: int, secrets: Secrets = NO_SECRETS) -> RunningPod:
            # a short path: the sockets of Ray lie in it, and their names have a limit
            folder = Path(tempfile.mkdtemp(prefix="ll-", dir="/tmp"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            return stack.enter_context(RunningPod(pod, network, host, folder, secrets, known))

        yield enter


class RunningPod:
    """A pod on a host of `network`, which knows Services by `names`; nothing of it outlives the block."""

    def __init__(
        self,
        pod: Pod,
        network: Network,
        host: int,
        folder: Path,
        secrets: Secrets = NO_SECRETS,
        names: Names = NO_NAMES,
    ) -> None:
        self.pod, self.address = pod, network.addresses[host]
        known = "".join(f"{address} {name}\n" for name, address in names.items())
        (folder / ".hosts").write_text(Path("/etc/hosts").read_text() + known)
        for name, content in secrets.items():
            write_secret(folder / name, content)
        self._namespace, self._interface = network.namespaces[host], network.interface
        self._folder = folder
        self.containers: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        # Ray asks which address a packet would have that leaves the pod: in a cluster there is a way out
        way_out = ["route", "replace", "default", "dev", self._interface]
        subprocess.run(["ip", "-n", self._namespace, *way_out], check=True)
        with ExitStack() as stack:
            own = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
            pause = ["bash", "-c", PAUSE, "bash", str(self._folder), *install_folders_in_tmp()]
            self._sandbox = subprocess.Popen(["ip", "netns", "exec", self._namespace, *own, *pause])
            stack.callback(self.delete)
            self._first = self._find_first()
            stack.pop_all()
        return self

    def _find_first(self) -> int:
        """The pod's first process, once its /tmp is its own."""
        deadline = monotonic() + SECONDS
        while monotonic() < deadline:
            inside = psutil.Process(self._sandbox.pid).children(recursive=True)
            if any(map(_sleeps, inside)):
                return inside[0].pid
            sleep(0.02)
        raise AssertionError("the pod has no processes")

    def __exit__(self, *exception: object) -> None:
        self.delete()

    def delete(self) -> None:
        """Ends all that runs in it at once, as when its machine is lost."""
        self._sandbox.kill()  # and with the first process of a namespace go all others
        self._sandbox.wait()
        for container in self.containers.values():
            container.wait(SECONDS)

    def start(self, name: str, command: Sequence[str] = ()) -> "subprocess.Popen[str]":
        """Starts a container: with its own command, or with the one that the operator gives it."""
        container = self.pod.container(name)
        self.containers[name] = self.execute(name, list(command) or [*container["command"], *container["args"]])
        return self.containers[name]

    def execute(self, name: str, command: Sequence[str]) -> "subprocess.Popen[str]":
        """A command in a container, as `kubectl exec` and hooks run them."""
        container = self.pod.container(name)
        variables = self._environment(container)
        for variable, value in variables.items():
            command = [word.replace(f"$({variable})", value) for word in command]
        for there, here in self._secrets(container).items():
            command = [word.replace(there, here) for word in command]
            variables = {variable: value.replace(there, here) for variable, value in variables.items()}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        return subprocess.Popen([*self.inside, *command], env=variables, text=True, **pipes)

    @property
    def inside(self) -> tuple[str, ...]:
        """Goes before a command that is to run in the pod."""
        return ("nsenter", f"--target={self._first}", "--net", "--mount", "--pid", "--wdns=/tmp", "--")

    def _environment(self, container: Document) -> dict[str, str]:
        """The image's, the operator's for Ray, and the manifest's."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        found = {"PATH": path, "HOME": "/tmp", "XDG_CACHE_HOME": str(cache_folder().parent), "OMP_NUM_THREADS": "1"}
        found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN} if container["name"].startswith("ray-") else {}
        for one in container.get("env", ()):
            if "value" in one:
                found[one["name"]] = one["value"].replace("/opt/longleaf/lookup", str(embedded_model()))
            elif "fieldRef" in one["valueFrom"]:
                facts = {"status.podIP": self.address, "metadata.namespace": NAMESPACE}
                found[one["name"]] = facts[one["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                found[one["name"]] = TOKEN
        return found

    def _secrets(self, container: Document) -> dict[str, str]:
        """Where Secrets are mounted, and where they are instead."""
        secrets = {one["name"]: one["secret"]["secretName"] for one in self.pod.spec["volumes"] if "secret" in one}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        return {path: f"/tmp/{secrets[name]}" for path, name in mounts.items() if name in secrets}

    def hook(self, name: str) -> "subprocess.Popen[str]":
        """Starts the preStop hook of a container."""
        return self.execute(name, self.pod.container(name)["lifecycle"]["preStop"]["exec"]["command"])

    def terminate(self, name: str) -> None:
        """SIGTERM to a container's first process, unless that has ended."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.containers[name].pid).children():
                process.send_signal(signal.SIGTERM)

    def stop(self, name: str) -> tuple[int, int]:
        """Stops a container as a kubelet does, independently of the others: its hook, then SIGTERM. Returns the exit
        codes of both. A hook may fail if another container's hook has ended the service before.

        Raises subprocess.TimeoutExpired if the stop takes longer than the pod's grace period.
        """
        deadline = monotonic() + self.pod.spec["terminationGracePeriodSeconds"]
        hook = self.hook(name)
        hook.communicate(timeout=deadline - monotonic())
        self.terminate(name)
        return hook.returncode, self.containers[name].wait(deadline - monotonic())


Place = Callable[..., RunningPod]
"""Of a pod, a host's number and Secrets."""
