"""The HTTP gateway in the manifests: as secured as its service, with all components, and with deliberate faults."""

import copy
import re

import pytest
import typer

from longleaf.cli.app import app
from longleaf.options import config_from_flags
from longleaf.service_settings import GatewayConfig
from tests.support.manifests.http_gateway import config_of
from tests.support.manifests.pods import Pod, environment, gateway_of, of_kind, options, pods, selects
from tests.support.manifests.rendering import CLOSING, MANIFESTS, render, with_components, with_these
from tests.support.manifests.rules import problems
from tests.support.manifests.validation import all_errors

RAY = re.search(r"^ray==(.+)$", (MANIFESTS.parent / "requirements.lock").read_text(), re.MULTILINE).group(1)
CLOSED = ("gpu-1x8", "gpu-1x8-70b", "gpu-2x8", "gpu-2x8-405b")


@pytest.fixture
def whole(tmp_path):
    return with_components(tmp_path, "gpu-2x8")


@pytest.fixture
def broken(whole):
    return copy.deepcopy(whole)


def container(documents):
    return gateway_of(documents).container("gateway")


def only(documents, kind):
    (found,) = of_kind(documents, kind)
    return found["spec"]


def named(documents, kind, name):
    return next(one["spec"] for one in of_kind(documents, kind) if one["metadata"]["name"] == name)


def taken(pod: Pod) -> GatewayConfig:
    """The settings of `longleaf gateway`, by its own parser."""
    values = environment(pod.container("gateway")) | {"POD_NAMESPACE": "longleaf"}
    words = list(pod.container("gateway")["args"])
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    given = typer.main.get_command(app).commands["gateway"].make_context("gateway", words).params
    return config_from_flags(GatewayConfig, given)


@pytest.mark.parametrize("overlay", ["cpu", *CLOSED])
def test_every_overlay_has_a_gateway_with_a_valid_command(overlay):
    found = render(MANIFESTS / "overlays" / overlay)
    assert container(found)["command"] == ["longleaf", "gateway"]
    assert taken(gateway_of(found)).insecure is (overlay == "cpu")
    config_of(gateway_of(found)).check()


def test_gateway_accepts_the_names_of_its_service(whole):
    assert taken(gateway_of(whole)).allow_host == [
        "longleaf-gateway",
        "longleaf-gateway.longleaf",
        "longleaf-gateway.longleaf.svc",
    ]
    assert taken(gateway_of(whole)).public_url == "https://books.example.com"


def test_secured_gateway_verifies_the_service_with_its_authority(tmp_path):
    found = with_these(tmp_path, "cpu", ["certificates", "credentials", "authority"], CLOSING)
    assert list(all_errors(found)) == [] and problems(found, RAY) == []
    config = taken(gateway_of(found))
    assert config.tls_ca == "/etc/longleaf/certificate/ca.crt" and not config.insecure
    issuers = {one["spec"]["issuerRef"]["name"] for one in of_kind(found, "Certificate") if "dnsNames" in one["spec"]}
    assert issuers == {"longleaf-authority"}


def test_gateway_has_no_key_of_the_service_and_no_credential(whole):
    secrets = [one["secret"]["secretName"] for one in gateway_of(whole).spec["volumes"] if "secret" in one]
    assert secrets == ["longleaf-gateway-certificate"]
    assert environment(container(whole)).keys() == {"PUBLIC_URL", "TMPDIR"} and "envFrom" not in container(whole)


def test_gateway_reaches_only_the_service_and_dns(whole):
    policies = [one["spec"] for one in of_kind(whole, "NetworkPolicy")]
    inside = [one for one in policies if selects(one["podSelector"], gateway_of(whole)) and "egress" in one]
    opened = [{port["port"] for port in rule["ports"]} for policy in inside for rule in policy["egress"]]
    assert opened == [{50051}, {53}]


def test_smallest_overlay_needs_no_gateway_api_and_no_prometheus():
    kinds = {one["kind"] for one in render(MANIFESTS / "overlays" / "cpu")}
    assert not kinds & {"HTTPRoute", "PodMonitor", "Certificate", "BackendTLSPolicy"}
    scaler = only(render(MANIFESTS / "overlays" / "cpu"), "HorizontalPodAutoscaler")
    assert [one["type"] for one in scaler["metrics"]] == ["Resource"] and scaler["minReplicas"] == 2


def test_gateway_is_scaled_by_streams_with_prometheus(whole):
    cpu, streams = only(whole, "HorizontalPodAutoscaler")["metrics"]
    assert cpu["resource"]["name"] == "cpu"
    assert streams["pods"]["metric"] == {"name": "longleaf_gateway_streams"}
    assert options(container(whole))["metrics-port"] == "9464"


def test_gateways_allow_long_streams(whole):
    (policy,) = of_kind(whole, "BackendTrafficPolicy")
    routes = {(one["kind"], one["metadata"]["name"]) for one in whole if one["kind"] in ("GRPCRoute", "HTTPRoute")}
    assert {(one["kind"], one["name"]) for one in policy["spec"]["targetRefs"]} == routes


def test_base_has_no_gateway():
    assert gateway_of(render(MANIFESTS / "base")) is None
    assert not any(problem.startswith("gateway") for problem in problems(render(MANIFESTS / "base"), RAY))
    assert "longleaf-gateway" in {pod.owner for pod in pods(render(MANIFESTS / "overlays" / "cpu"))}


def arguments(change):
    return lambda found: change(container(found)["args"])


BREAKS = {
    "gateway: host: 0.0.0.0 can be reached": arguments(lambda args: [args.pop(8), args.pop(8)]),
    "gateway: --colour is no option": arguments(lambda args: args.append("--colour=red")),
    "gateway: is not encrypted as the service is": arguments(lambda args: args.pop(10)),
    "gateway: says --insecure": arguments(lambda args: args.append("--insecure")),
    "/tmp/tls.crt is of no Secret": arguments(lambda args: args.__setitem__(8, "--tls-cert=/tmp/tls.crt")),
    "is not of its own certificate": lambda found: next(
        one for one in gateway_of(found).spec["volumes"] if "secret" in one
    )["secret"].update(secretName="longleaf-certificate"),
    "Certificate longleaf-gateway-certificate: is not for longleaf-gateway": lambda found: named(
        found, "Certificate", "longleaf-gateway"
    ).update(dnsNames=["localhost"]),
    "asks longleaf:50052": arguments(lambda args: args.__setitem__(0, "--server=longleaf:50052")),
    "no NetworkPolicy lets it in": lambda found: found.remove(
        next(one for one in found if one["metadata"]["name"] == "longleaf-from-gateway")
    ),
    "may not go out to the service": lambda found: named(found, "NetworkPolicy", "longleaf-gateway")["egress"][0].pop(
        "ports"
    ),
    "opens [8000, 50051]": lambda found: named(found, "NetworkPolicy", "longleaf-gateway")["ingress"][0][
        "ports"
    ].append({"protocol": "TCP", "port": 50051}),
    "readinessProbe does not ask /readyz by HTTPS": lambda found: container(found)["readinessProbe"]["httpGet"].pop(
        "scheme"
    ),
    "livenessProbe does not ask /healthz": lambda found: container(found)["livenessProbe"]["httpGet"].update(
        path="/readyz"
    ),
    "has no port http, 8000": lambda found: container(found)["ports"][0].update(containerPort=8001),
    "Service longleaf-gateway: not https": lambda found: named(found, "Service", "longleaf-gateway")["ports"][0].update(
        appProtocol="http"
    ),
    "new callers come while it ends": lambda found: container(found).pop("lifecycle"),
    "before its 125 s to end are over": lambda found: gateway_of(found).spec.update(terminationGracePeriodSeconds=60),
    "must let one go at a time": lambda found: named(found, "PodDisruptionBudget", "longleaf-gateway").update(
        maxUnavailable=2
    ),
    "has two of it at least": lambda found: only(found, "HorizontalPodAutoscaler").update(minReplicas=1),
    "takes away what": lambda found: only(found, "Deployment").update(replicas=2),
    "is scaled by ['cpu']": lambda found: only(found, "HorizontalPodAutoscaler")["metrics"].pop(),
    "shares ['longleaf.example.com'] with a GRPCRoute": lambda found: only(found, "HTTPRoute").update(
        hostnames=["longleaf.example.com"]
    ),
    "and the gateway for other.example": lambda found: next(
        one for one in container(found)["env"] if one["name"] == "PUBLIC_URL"
    ).update(value="https://other.example"),
    "does not lead to the gateway": lambda found: only(found, "HTTPRoute")["rules"][0]["backendRefs"][0].update(
        port=50051
    ),
    "ends streams": lambda found: only(found, "HTTPRoute")["rules"][0].pop("timeouts"),
    "HTTPRoute longleaf-gateway: goes to ['longleaf-gateway'], and ['longleaf'] are encrypted": lambda found: (
        found.remove(
            next(one for one in of_kind(found, "BackendTLSPolicy") if one["metadata"]["name"] == "longleaf-gateway")
        )
    ),
    "gateway: metrics are for its pod alone": arguments(lambda args: args.remove("--metrics-host=0.0.0.0")),
    "longleaf-gateway: is not spread": lambda found: (
        gateway_of(found).spec["topologySpreadConstraints"][0]["labelSelector"].update(matchLabels={"x": "y"})
    ),
    "longleaf-gateway/gateway: may write to its root": lambda found: container(found)["securityContext"].pop(
        "readOnlyRootFilesystem"
    ),
}


@pytest.mark.parametrize("reported", BREAKS)
def test_broken_rule_is_reported(reported, broken):
    BREAKS[reported](broken)
    assert reported in "\n".join(problems(broken, RAY))


TYPOS = {
    "hostname": ("HTTPRoute", lambda spec: spec.update(hostname="x")),
    "'0 s'": ("HTTPRoute", lambda spec: spec["rules"][0]["timeouts"].update(request="0 s")),
    "'Prefix'": ("HTTPRoute", lambda spec: spec["rules"][0]["matches"][1]["path"].update(type="Prefix")),
    "matchExpression'": ("PodMonitor", lambda spec: spec["selector"].update(matchExpression=[])),
    "'in'": ("PodMonitor", lambda spec: spec["selector"]["matchExpressions"][0].update(operator="in")),
    "averageValu'": (
        "HorizontalPodAutoscaler",
        lambda spec: spec["metrics"][1]["pods"]["target"].update(averageValu="1"),
    ),
    "maxSurg'": ("Deployment", lambda spec: spec["strategy"]["rollingUpdate"].update(maxSurg=1)),
}


@pytest.mark.parametrize("typo", TYPOS)
def test_typo_is_detected(typo, broken):
    kind, plant = TYPOS[typo]
    (document,) = of_kind(broken, kind)
    assert list(all_errors([document])) == []
    plant(document["spec"])
    (errors,) = all_errors([document])
    assert typo in errors
