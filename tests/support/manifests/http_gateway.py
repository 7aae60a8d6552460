"""Rules for the HTTP gateway, if there is one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from longleaf.config import DEFAULT_PORT
from longleaf.errors import InvalidArgument
from longleaf.service_settings import DEFAULT_HTTP_PORT, GatewayConfig
from tests.support.manifests.access_control import CERTIFICATE_KEYS, secret_file
from tests.support.manifests.pods import GATEWAY, Pod, gateway_of, of_kind, options, pods, selects, serve_of

Document = dict[str, Any]
Documents = Sequence[Document]
FILES = ("tls-cert", "tls-key", "tls-ca")
PROBES = {"readinessProbe": "/readyz", "livenessProbe": "/healthz"}
STREAMS = "longleaf_gateway_streams"


def config_of(pod: Pod) -> GatewayConfig:
    """The configuration in a gateway's command. Raises msgspec.ValidationError for unknown options."""
    container = pod.container("gateway")
    names = [word.partition("=")[2] for word in container["args"] if word.startswith("--allow-host=")]
    given: dict[str, Any] = {name.replace("-", "_"): value for name, value in options(container).items()}
    given |= {"allow_host": names} | ({"insecure": True} if "insecure" in given else {})
    if unknown := given.keys() - set(GatewayConfig.__struct_fields__):
        raise msgspec.ValidationError(f"--{min(unknown)} is no option of a gateway")
    return msgspec.convert(given, GatewayConfig, strict=False)


def gateway_may_listen(documents: Documents) -> Iterator[str]:
    """By the rules that it has itself; and it is as closed as the service behind it."""
    if (pod := gateway_of(documents)) is None:
        return
    try:
        config_of(pod).check()
    except (InvalidArgument, msgspec.ValidationError) as error:
        yield f"gateway: {error}"
    given, service = options(pod.container("gateway")), options(serve_of(documents))
    if ("tls-cert" in given) != ("tls-cert" in service) or ("tls-ca" in given) != ("tls-cert" in service):
        yield "gateway: is not encrypted as the service is"
    if "insecure" in given and "insecure" not in service:
        yield "gateway: says --insecure, and need not"
    secrets = {one["spec"]["secretName"]: one["metadata"]["name"] for one in of_kind(documents, "Certificate")}
    for path in (given[name] for name in FILES if name in given):
        try:
            secret, key = secret_file(pod, pod.container("gateway"), path)
        except KeyError:
            yield f"gateway: {path} is of no Secret"
            continue
        if secrets.get(secret) != GATEWAY or key not in CERTIFICATE_KEYS:
            yield f"gateway: {path} is not of its own certificate"


def gateway_finds_the_service(documents: Documents) -> Iterator[str]:
    """By a name of its Service, at the port that a policy opens to it."""
    if (pod := gateway_of(documents)) is None:
        return
    name, _, port = options(pod.container("gateway")).get("server", "").partition(":")
    if (name, port) not in {(one["metadata"]["name"], str(DEFAULT_PORT)) for one in of_kind(documents, "Service")}:
        yield f"gateway: asks {name}:{port}, which is no Service"
    head = next(one for one in pods(documents) if one.owner == "head")
    policies = [one["spec"] for one in of_kind(documents, "NetworkPolicy")]
    inwards = [
        source
        for policy in policies
        if selects(policy["podSelector"], head)
        for rule in policy.get("ingress", ())
        if {one["port"] for one in rule.get("ports", ())} == {DEFAULT_PORT}
        for source in rule["from"]
    ]
    if not any("podSelector" in source and selects(source["podSelector"], pod) for source in inwards):
        yield "gateway: no NetworkPolicy lets it in to the service"
    outwards = [
        (target.get("podSelector", {}), {one["port"] for one in rule.get("ports", ())})
        for policy in policies
        if selects(policy["podSelector"], pod) and "Egress" in policy["policyTypes"]
        for rule in policy.get("egress", ())
        for target in rule.get("to", ({},))
    ]
    if [ports for selector, ports in outwards if selector and selects(selector, head)] != [{DEFAULT_PORT}]:
        yield "gateway: may not go out to the service, or to more than its port"


def gateway_is_probed(documents: Documents) -> Iterator[str]:
    if (pod := gateway_of(documents)) is None:
        return
    container = pod.container("gateway")
    scheme = "HTTPS" if "tls-cert" in options(container) else "HTTP"
    for name, path in PROBES.items():
        requested = {"scheme": "HTTP"} | container.get(name, {}).get("httpGet", {})
        if requested != {"path": path, "port": "http", "scheme": scheme}:
            yield f"gateway: {name} does not ask {path} by {scheme}"
    if {"name": "http", "containerPort": DEFAULT_HTTP_PORT} not in container["ports"]:
        yield f"gateway: has no port http, {DEFAULT_HTTP_PORT}"
    protocol = scheme.lower()
    for service in of_kind(documents, "Service"):
        found = [(one["port"], one.get("appProtocol")) for one in service["spec"]["ports"]]
        if selects(service["spec"]["selector"], pod) and found != [(DEFAULT_HTTP_PORT, protocol)]:
            yield f"Service {service['metadata']['name']}: not {protocol} at {DEFAULT_HTTP_PORT}"


def gateways_end_one_after_the_other(documents: Documents) -> Iterator[str]:
    """Gateways are replaced one at a time, and each has time to finish running requests."""
    if (pod := gateway_of(documents)) is None:
        return
    container = pod.container("gateway")
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
    if hook[0] != "sleep":
        yield "gateway: new callers come while it ends"
    needed = float(hook[1]) + float(options(container).get("drain-seconds", 0))
    if pod.spec.get("terminationGracePeriodSeconds", 30) <= needed:
        yield f"gateway: is killed before its {needed:g} s to end are over"
    budgets = [
        one["spec"] for one in of_kind(documents, "PodDisruptionBudget") if selects(one["spec"]["selector"], pod)
    ]
    if [one.get("maxUnavailable") for one in budgets] != [1]:
        yield "gateway: a PodDisruptionBudget must let one go at a time"


def gateways_are_scaled(documents: Documents) -> Iterator[str]:
    """At least two; scaled by their streams if that metric is available, and by CPU load."""
    if gateway_of(documents) is None:
        return
    (deployment,) = of_kind(documents, "Deployment")
    scalers = [one["spec"] for one in of_kind(documents, "HorizontalPodAutoscaler")]
    targets = [(one["scaleTargetRef"]["kind"], one["scaleTargetRef"]["name"]) for one in scalers]
    if targets != [("Deployment", deployment["metadata"]["name"])] or scalers[0].get("minReplicas", 1) < 2:
        yield "gateway: no HorizontalPodAutoscaler has two of it at least"
        return
    if "replicas" in deployment["spec"]:
        yield "gateway: who applies it takes away what the HorizontalPodAutoscaler added"
    metrics = scalers[0]["metrics"]
    reported = {one["pods"]["metric"]["name"] if one["type"] == "Pods" else one["resource"]["name"] for one in metrics}
    if reported != {"cpu"} | ({STREAMS} if of_kind(documents, "PodMonitor") else set[str]()):
        yield f"gateway: is scaled by {sorted(reported)}"


def routes_lead_to_the_gateway(documents: Documents) -> Iterator[str]:
    """By a name that browsers know and no route of gRPC has: a listener takes one of both."""
    if (pod := gateway_of(documents)) is None:
        return
    routes = of_kind(documents, "HTTPRoute")
    taken = {name for one in of_kind(documents, "GRPCRoute") for name in one["spec"]["hostnames"]}
    for route in routes:
        name = f"HTTPRoute {route['metadata']['name']}"
        if shared := taken & set(route["spec"]["hostnames"]):
            yield f"{name}: shares {sorted(shared)} with a GRPCRoute"
        public = urlsplit(options(pod.container("gateway")).get("public-url", "")).hostname
        if route["spec"]["hostnames"] != [public]:
            yield f"{name}: is for {route['spec']['hostnames']}, and the gateway for {public}"
        for rule in route["spec"]["rules"]:
            if [(one["name"], one["port"]) for one in rule["backendRefs"]] != [(GATEWAY, DEFAULT_HTTP_PORT)]:
                yield f"{name}: does not lead to the gateway"
            if rule.get("timeouts") != {"request": "0s"}:
                yield f"{name}: ends streams"


HTTP_RULES: tuple[Callable[[Documents], Iterator[str]], ...] = (
    gateway_may_listen,
    gateway_finds_the_service,
    gateway_is_probed,
    gateways_end_one_after_the_other,
    gateways_are_scaled,
    routes_lead_to_the_gateway,
)
