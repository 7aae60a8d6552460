"""Rules for manifests beyond their schemas. Each rule yields a sentence for each violation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from longleaf.config import DEFAULT_PORT
from tests.support.manifests.access_control import GATEWAY_RULES
from tests.support.manifests.http_gateway import HTTP_RULES
from tests.support.manifests.pods import (
    GATEWAY,
    Pod,
    cluster,
    environment,
    groups,
    of_kind,
    options,
    pods,
    selects,
    serve_of,
)

Document = dict[str, Any]
Documents = Sequence[Document]
HEALTH = ("longleaf.v1.GenerationService", "liveness")
USER = 1000
HOUR = 3600
"""Seconds."""


def problems(documents: Documents, ray_version: str) -> list[str]:
    """All violations in a complete service."""
    found = [problem for rule in RULES for problem in rule(documents)]
    if (reported := cluster(documents)["rayVersion"]) != ray_version:
        found.append(f"rayVersion is {reported}, the lock has {ray_version}")
    return found


def images_are_pinned(documents: Documents) -> Iterator[str]:
    for pod, container in _containers(documents):
        name, _, tag = container["image"].rpartition("/")[2].partition(":")
        if "@sha256:" not in container["image"] and tag in ("", "latest"):
            yield f"{pod.owner}/{container['name']}: image {name} has no tag of a version"
    members = {container["image"] for pod, container in _containers(documents) if pod.owner in groups(documents)}
    if len(members) > 1:
        yield f"Ray's nodes have different images: {', '.join(sorted(members))}"


def containers_have_limits(documents: Documents) -> Iterator[str]:
    for pod, container in _containers(documents):
        limits = container.get("resources", {}).get("limits", {})
        requests = container.get("resources", {}).get("requests", {})
        yield from (
            f"{pod.owner}/{container['name']}: no limit of {one}" for one in ("cpu", "memory") if one not in limits
        )
        if requests.get("memory") != limits.get("memory"):
            yield f"{pod.owner}/{container['name']}: asks for less memory than it may take"


def pods_are_restricted(documents: Documents) -> Iterator[str]:
    """Pod Security's level `restricted`, a root file system that is read only, and no token of an account."""
    for pod in pods(documents):
        user = pod.spec.get("securityContext", {})
        wanted = {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}}
        yield from (f"{pod.owner}: {name} is not {value}" for name, value in wanted.items() if user.get(name) != value)
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.owner}: gets a token of its account"
        yield from (f"{pod.owner}: {name}" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.spec.get(name))
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret", "downwardAPI", "ephemeral"}
        for volume in pod.spec.get("volumes", ()):
            yield from (
                f"{pod.owner}: volume {volume['name']} is a {kind}" for kind in volume.keys() - allowed - {"name"}
            )
        for container in pod.containers():
            yield from (f"{pod.owner}/{container['name']}: {reported}" for reported in _unconfined(container))


def _unconfined(container: Document) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False:
        yield "may gain privileges"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield "keeps capabilities"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "may write to its root"
    yield from (
        f"sets {name}" for name in context.keys() & {"privileged", "runAsUser", "runAsNonRoot", "seccompProfile"}
    )
    yield from (
        f"takes port {port['hostPort']} of its host" for port in container.get("ports", ()) if "hostPort" in port
    )


def ray_comes_first(documents: Documents) -> Iterator[str]:
    """The operator starts Ray in the first container of a pod, independent of its name."""
    for name, group in groups(documents).items():
        first = group["template"]["spec"]["containers"][0]["name"]
        if first != ("ray-head" if name == "head" else "ray-worker"):
            yield f"{name}: Ray would run in {first}"


def volumes_are_there(documents: Documents) -> Iterator[str]:
    """For every mount, and for every claim."""
    claims = {one["metadata"]["name"] for one in of_kind(documents, "PersistentVolumeClaim")}
    for pod in pods(documents):
        volumes = {one["name"]: one for one in pod.spec.get("volumes", ())}
        mounted = {mount["name"] for container in pod.containers() for mount in container.get("volumeMounts", ())}
        yield from (f"{pod.owner}: no volume {name}" for name in mounted - volumes.keys())
        yield from (f"{pod.owner}: volume {name} is not mounted" for name in volumes.keys() - mounted)
        requested = {
            one["persistentVolumeClaim"]["claimName"] for one in volumes.values() if "persistentVolumeClaim" in one
        }
        yield from (f"{pod.owner}: no claim {name}" for name in requested - claims)


def service_is_probed(documents: Documents) -> Iterator[str]:
    serve = serve_of(documents)
    ready, live = HEALTH
    port = int(options(serve).get("health-port", DEFAULT_PORT))
    for name, service in {"startupProbe": ready, "readinessProbe": ready, "livenessProbe": live}.items():
        if serve.get(name, {}).get("grpc") != {"port": port, "service": service}:
            yield f"serve: {name} does not ask {service} at {port}"
    startup = serve.get("startupProbe", {})
    seconds = startup.get("periodSeconds", 0) * startup.get("failureThreshold", 0)
    if seconds < HOUR:
        yield f"serve: may start for {seconds} s, less than an hour"
    waits = sum(float(options(serve)[name]) for name in ("wait-for-ranks", "start-timeout"))
    if seconds <= waits:
        yield f"serve: is killed after {seconds} s of starting, and would give up and say why after {waits:g} s"


def ports_are_the_defaults(documents: Documents) -> Iterator[str]:
    serve = serve_of(documents)
    if options(serve)["port"] != str(DEFAULT_PORT):
        yield f"serve: listens on {options(serve)['port']}, not on {DEFAULT_PORT}"
    given = options(serve)
    named = {DEFAULT_PORT} | {int(given[name]) for name in ("health-port", "metrics-port") if name in given}
    if (found := {port["containerPort"] for port in serve["ports"]}) != named:
        yield f"serve: names ports {sorted(found)}, not {sorted(named)}"
    protocol = "https" if "tls-cert" in given else "kubernetes.io/h2c"
    for service in of_kind(documents, "Service"):
        if service["metadata"]["name"] == GATEWAY:
            continue
        for port in service["spec"]["ports"]:
            if port["port"] != DEFAULT_PORT or port.get("appProtocol") != protocol:
                yield f"Service {service['metadata']['name']}: not gRPC at {DEFAULT_PORT}, as {protocol}"


def selectors_find_pods(documents: Documents) -> Iterator[str]:
    everyone = pods(documents)
    for kind, path in {
        "Service": "selector",
        "PodDisruptionBudget": "selector",
        "NetworkPolicy": "podSelector",
    }.items():
        for one in of_kind(documents, kind):
            if not any(selects(one["spec"][path], pod) for pod in everyone):
                yield f"{kind} {one['metadata']['name']}: selects no pod"
    for pod in everyone:
        for spread in pod.spec.get("topologySpreadConstraints", ()):
            if not selects(spread["labelSelector"], pod):
                yield f"{pod.owner}: is not spread, its labels are others"
    for service in of_kind(documents, "Service"):
        for pod in everyone:
            if selects(service["spec"]["selector"], pod):
                names = {port["name"] for container in pod.containers() for port in container.get("ports", ())}
                requested = {port["targetPort"] for port in service["spec"]["ports"]}
                yield from (
                    f"Service {service['metadata']['name']}: {pod.owner} has no {name}" for name in requested - names
                )


def sizes_agree(documents: Documents) -> Iterator[str]:
    """World size, slots, GPUs, and pods that must stay."""
    serve, found = serve_of(documents), groups(documents)
    head = found.pop("head")
    if {name: head["rayStartParams"].get(name) for name in ("num-cpus", "num-gpus")} != {
        "num-cpus": "0",
        "num-gpus": "0",
    }:
        yield "head: has slots"
    slot = "num-gpus" if options(serve)["device"] == "cuda" else "num-cpus"
    slots = sum(group["replicas"] * int(group["rayStartParams"][slot]) for group in found.values())
    if slots != int(options(serve)["world-size"]):
        yield f"world size {options(serve)['world-size']}, and {slots} slots"
    for name, group in found.items():
        if not group["replicas"] == group["minReplicas"] == group["maxReplicas"]:
            yield f"{name}: its size is not fixed"
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        if int(limits.get("nvidia.com/gpu", 0)) != int(group["rayStartParams"]["num-gpus"]):
            yield f"{name}: tells Ray of {group['rayStartParams']['num-gpus']} GPUs, and takes others"
        if int(limits["cpu"]) < int(group["rayStartParams"]["num-cpus"]):
            yield f"{name}: has fewer processors than slots"
    members = 1 + sum(group["replicas"] for group in found.values())
    ray = [pod for pod in pods(documents) if pod.owner in groups(documents)]
    for budget in of_kind(documents, "PodDisruptionBudget"):
        if not any(selects(budget["spec"]["selector"], pod) for pod in ray):
            continue
        if budget["spec"].get("minAvailable") != members:
            yield f"PodDisruptionBudget {budget['metadata']['name']}: minAvailable is not {members}"


def endings_are_graceful(documents: Documents) -> Iterator[str]:
    drain = float(options(serve_of(documents))["drain-seconds"])
    for pod in pods(documents):
        if pod.owner not in groups(documents):
            continue
        if pod.spec.get("terminationGracePeriodSeconds", 30) < 2 * drain:
            yield f"{pod.owner}: has less than twice --drain-seconds to end"
        for container in pod.containers():
            if "preStop" not in container.get("lifecycle", {}):
                yield f"{pod.owner}/{container['name']}: ends without a hook"


def ray_is_joined_as_one_machine(documents: Documents) -> Iterator[str]:
    """By `serve`, with the cluster's token; a command joins Ray only from its process namespace and folder."""
    head = next(pod for pod in pods(documents) if pod.owner == "head")
    if head.spec.get("shareProcessNamespace") is not True:
        yield "head: its containers do not share their processes"
    for container in head.containers():
        if "/tmp" not in {mount["mountPath"] for mount in container["volumeMounts"]}:
            yield f"head/{container['name']}: does not share /tmp"
    serve = serve_of(documents)
    token = {"secretKeyRef": {"name": of_kind(documents, "RayCluster")[0]["metadata"]["name"], "key": "auth_token"}}
    given = {one["name"]: one.get("valueFrom") for one in serve["env"]}
    if cluster(documents).get("authOptions") != {"mode": "token"}:
        yield "Ray asks for no token"
    if environment(serve).get("RAY_AUTH_MODE") != "token" or given.get("RAY_AUTH_TOKEN") != token:
        yield "serve: has not the token of its Ray"
    if options(serve)["ray-address"] != "$(POD_IP):6379":
        yield "serve: does not join the Ray of its pod"


def no_account_has_rights(documents: Documents) -> Iterator[str]:
    yield from (f"{one['kind']} {one['metadata']['name']}" for one in documents if "Role" in one["kind"])
    accounts = {one["metadata"]["name"] for one in of_kind(documents, "ServiceAccount")}
    for pod in pods(documents):
        if pod.spec.get("serviceAccountName") not in accounts:
            yield f"{pod.owner}: has not the account without rights"


def _containers(documents: Documents) -> Iterator[tuple[Pod, Document]]:
    for pod in pods(documents):
        for container in pod.containers():
            yield pod, container


RULES: tuple[Callable[[Documents], Iterator[str]], ...] = (
    images_are_pinned,
    containers_have_limits,
    pods_are_restricted,
    ray_comes_first,
    volumes_are_there,
    service_is_probed,
    ports_are_the_defaults,
    selectors_find_pods,
    sizes_agree,
    endings_are_graceful,
    ray_is_joined_as_one_machine,
    no_account_has_rights,
    *GATEWAY_RULES,
    *HTTP_RULES,
)
