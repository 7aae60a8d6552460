"""Rules for the entry points of a service: certificates, credentials, hooks, and the metrics port."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from longleaf.errors import InvalidArgument
from longleaf.service_settings import SecurityConfig
from tests.support.manifests.pods import (
    Pod,
    cluster,
    environment,
    gateway_of,
    of_kind,
    options,
    pods,
    selects,
    serve_of,
)

Document = dict[str, Any]
Documents = Sequence[Document]
CERTIFICATE_KEYS = {"tls.crt", "tls.key", "ca.crt"}
"""The keys that cert-manager writes into a Secret."""
RAYS_PORT = "metrics"
"""The name that KubeRay gives to a port of Ray's own, unless that has one."""


def secret_file(pod: Pod, container: Document, path: str) -> tuple[str, str]:
    """The Secret, and the key in it, that `path` is in a container. Raises KeyError where it is none."""
    folder, _, key = path.rpartition("/")
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volume = next(one for one in pod.spec["volumes"] if one["name"] == mounts[folder])
    return volume["secret"]["secretName"], key


def files_given(documents: Documents) -> Iterator[tuple[Document, str]]:
    """Containers that read a file at a path: the coordinator in Ray's container, and the hooks."""
    head = _head(documents)
    given = options(serve_of(documents))
    coordinator = head.container("ray-head")
    names = ("tls-cert", "tls-key", "tls-client-ca", "credentials")
    yield from ((coordinator, given[name]) for name in names if name in given)
    for container in head.containers():
        yield from ((container, path) for path in hook_files(container).values())


def hook_files(container: Document) -> dict[str, str]:
    """The files with which a container's hook authenticates: the CA certificate and the credential."""
    hook = options(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}))
    found = {"tls-ca": environment(container).get("LONGLEAF_TLS_CA"), "credential-file": hook.get("credential-file")}
    return {name: path for name, path in found.items() if path is not None}


def service_may_listen(documents: Documents) -> Iterator[str]:
    """Checks the rules that `serve` applies to its addresses, and that clients can only connect through the gateway."""
    given = options(serve_of(documents))
    found = {
        name: given.get(name.replace("_", "-")) for name in ("tls_cert", "tls_key", "tls_client_ca", "credentials")
    }
    is_closed = found["tls_cert"] is not None and found["credentials"] is not None
    try:
        security = SecurityConfig(
            tls_cert=found["tls_cert"],
            tls_key=found["tls_key"],
            tls_client_ca=found["tls_client_ca"],
            credentials=found["credentials"],
            insecure="insecure" in given,
        )
        security.check(given["host"])
    except InvalidArgument as error:
        yield f"serve: {error}"
    if is_closed and "insecure" in given:
        yield "serve: says --insecure, and need not"


def files_are_mounted(documents: Documents) -> Iterator[str]:
    """Each file is mounted from a Secret; certificate files from the one that cert-manager writes."""
    head = _head(documents)
    of_certificates = {one["spec"]["secretName"] for one in of_kind(documents, "Certificate")}
    for container, path in files_given(documents):
        try:
            secret, key = secret_file(head, container, path)
        except KeyError:
            yield f"head/{container['name']}: {path} is of no Secret"
            continue
        if secret in of_certificates and key not in CERTIFICATE_KEYS:
            yield f"head/{container['name']}: {path} is not in the Secret of a certificate"


def hooks_come_in(documents: Documents) -> Iterator[str]:
    """A hook is a client like others and needs the same files."""
    given = options(serve_of(documents))
    wanted = {"tls-ca"} if "tls-cert" in given else set[str]()
    wanted |= {"credential-file"} if "credentials" in given else set[str]()
    for container in _head(documents).containers():
        if (found := hook_files(container).keys()) != wanted:
            yield f"head/{container['name']}: its hook has {sorted(found)}, and needs {sorted(wanted)}"


def certificates_have_the_names(documents: Documents) -> Iterator[str]:
    """Certificates contain the names by which hooks and clients connect."""
    for pod, container, given in _those_who_listen(documents):
        if "tls-cert" not in given:
            continue
        try:
            secret, _ = secret_file(pod, container, given["tls-cert"])
        except KeyError:
            continue  # reported by another rule
        certificates = [one["spec"] for one in of_kind(documents, "Certificate") if one["spec"]["secretName"] == secret]
        if len(certificates) != 1:
            yield f"Secret {secret}: {len(certificates)} certificates are written there"
            continue
        names = {*certificates[0]["dnsNames"], *certificates[0]["ipAddresses"]}
        services = [one for one in of_kind(documents, "Service") if selects(one["spec"]["selector"], pod)]
        wanted = {"localhost", "127.0.0.1"} | {one["metadata"]["name"] for one in services}
        for policy in of_kind(documents, "BackendTLSPolicy"):
            if not {one["name"] for one in policy["spec"]["targetRefs"]} & wanted:
                continue
            validation = policy["spec"]["validation"]
            wanted.add(validation["hostname"])
            if [(one["kind"], one["name"]) for one in validation["caCertificateRefs"]] != [("Secret", secret)]:
                yield f"BackendTLSPolicy {policy['metadata']['name']}: has not the authority of {secret}"
        yield from (f"Certificate {secret}: is not for {name}" for name in sorted(wanted - names))
        if "server auth" not in certificates[0]["usages"]:
            yield f"Certificate {secret}: is not a server's"


def gateways_speak_as_the_service_does(documents: Documents) -> Iterator[str]:
    is_encrypted = "tls-cert" in options(serve_of(documents))
    policies = of_kind(documents, "BackendTLSPolicy")
    targets = {one["name"] for policy in policies for one in policy["spec"]["targetRefs"] if one["kind"] == "Service"}
    for route in (*of_kind(documents, "GRPCRoute"), *of_kind(documents, "HTTPRoute")):
        requested = {one["name"] for rule in route["spec"]["rules"] for one in rule["backendRefs"]}
        if not requested <= targets if is_encrypted else targets:
            name = f"{route['kind']} {route['metadata']['name']}"
            yield f"{name}: goes to {sorted(requested)}, and {sorted(targets)} are encrypted"


def ports_are_open_to_whom_they_are_for(documents: Documents) -> Iterator[str]:
    """Those of clients; and those of metrics, to one namespace. Kubelets need no rule to check their own pods."""
    listening = _those_who_listen(documents)
    for policy in of_kind(documents, "NetworkPolicy"):
        name = f"NetworkPolicy {policy['metadata']['name']}"
        selected = [given for pod, _, given in listening if selects(policy["spec"]["podSelector"], pod)]
        metrics = {int(given["metrics-port"]) for given in selected if "metrics-port" in given}
        for rule in policy["spec"].get("ingress", ()):
            opened = {port["port"] for port in rule.get("ports", ())}
            if metrics and opened == metrics:
                if not rule.get("from") or any(one.keys() != {"namespaceSelector"} for one in rule["from"]):
                    yield f"{name}: opens metrics to more than a namespace"
            elif opened - {int(given["port"]) for given in selected}:
                yield f"{name}: opens {sorted(opened)}"


def metrics_are_found(documents: Documents) -> Iterator[str]:
    """By Prometheus, which looks for a port by its name."""
    monitors, listening = of_kind(documents, "PodMonitor"), _those_who_listen(documents)
    for pod, container, given in listening:
        what = "serve" if pod.owner == "head" else container["name"]
        if ("metrics-port" in given) != bool(monitors):
            yield f"{len(monitors)} PodMonitors, and {what} has {given.get('metrics-port', 'no port')} for metrics"
        elif monitors and given.get("metrics-host") != "0.0.0.0":
            yield f"{what}: metrics are for its pod alone"
    for monitor in monitors:
        name = f"PodMonitor {monitor['metadata']['name']}"
        found = [pod for pod in pods(documents) if selects(monitor["spec"]["selector"], pod)]
        if [pod.owner for pod in found] != [pod.owner for pod, _, _ in listening]:
            yield f"{name}: selects {[pod.owner for pod in found]}"
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            for pod, _, given in listening:
                ports = _ports_named(pod, endpoint["port"])
                if ports != [given.get("metrics-port")] or endpoint["port"] == RAYS_PORT:
                    yield f"{name}: asks {endpoint['port']}, which is {ports}"


def _ports_named(pod: Pod, name: str) -> list[str]:
    ports = [port for container in pod.containers() for port in container.get("ports", ())]
    return [str(port["containerPort"]) for port in ports if port["name"] == name]


def _those_who_listen(documents: Documents) -> list[tuple[Pod, Document, dict[str, str]]]:
    """The head, and the gateway if there is one; for each, the container that reads files, and its arguments."""
    head, gateway = _head(documents), gateway_of(documents)
    found = [(head, head.container("ray-head"), options(serve_of(documents)))]
    return (
        found
        if gateway is None
        else [*found, (gateway, gateway.container("gateway"), options(gateway.container("gateway")))]
    )


def _head(documents: Documents) -> Pod:
    return Pod("head", cluster(documents)["headGroupSpec"]["template"])


GATEWAY_RULES: tuple[Callable[[Documents], Iterator[str]], ...] = (
    service_may_listen,
    files_are_mounted,
    hooks_come_in,
    certificates_have_the_names,
    gateways_speak_as_the_service_does,
    ports_are_open_to_whom_they_are_for,
    metrics_are_found,
)
