"""Certificates, credentials and metrics of the manifests: each component separately, all of them, and with deliberate
faults."""

import copy
import re
from pathlib import Path

import pytest
import typer
import yaml

from longleaf.cli.app import app
from longleaf.config import embedded_model
from longleaf.credentials import parse_credentials
from longleaf.errors import InvalidArgument
from longleaf.options import config_from_flags
from longleaf.rank_choice import Machine, choose_ranks
from longleaf.service_settings import ServiceConfig
from tests.support.manifests.access_control import files_given, secret_file
from tests.support.manifests.pods import Pod, cluster, environment, of_kind, options, pods, selects, serve_of
from tests.support.manifests.rendering import CLOSING, MANIFESTS, of_readme, render, with_components, with_these
from tests.support.manifests.rules import problems
from tests.support.manifests.validation import all_errors

ROOT = MANIFESTS.parent
RAY = re.search(r"^ray==(.+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE).group(1)
CLOSED = ("gpu-1x8", "gpu-1x8-70b", "gpu-2x8", "gpu-2x8-405b")


@pytest.fixture
def whole(tmp_path):
    return with_components(tmp_path, "gpu-2x8")


@pytest.fixture
def small(tmp_path):
    """The smallest overlay, secured like the others."""
    return with_these(tmp_path, "cpu", ["certificates", "credentials", "authority"], CLOSING)


@pytest.fixture
def broken(whole):
    return copy.deepcopy(whole)


def head(documents):
    return cluster(documents)["headGroupSpec"]["template"]["spec"]


def head_pod(documents):
    return Pod("head", cluster(documents)["headGroupSpec"]["template"])


def hook(container):
    return container["lifecycle"]["preStop"]["exec"]["command"]


def named(documents, kind, name):
    return next(one for one in of_kind(documents, kind) if one["metadata"]["name"] == name)


def taken(container):
    """The settings of `longleaf serve`, parsed by its parser, with variables replaced by a pod's values."""
    values = environment(container) | {"POD_IP": "10.0.0.7", "MODEL": str(embedded_model())}
    words = list(container["args"])
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    command = typer.main.get_command(app).commands["serve"]
    given = command.make_context("serve", words).params
    return choose_ranks(config_from_flags(ServiceConfig, given), Machine(8, 0))


@pytest.mark.parametrize("overlay", ["cpu", *CLOSED])
def test_command_of_every_overlay_is_valid(overlay):
    taken(serve_of(render(MANIFESTS / "overlays" / overlay))).check()


def test_command_with_all_components_has_their_options(whole, tmp_path):
    config = taken(serve_of(whole))
    config.check()
    security, telemetry = config.security, config.telemetry
    assert telemetry.log_format == "json" and telemetry.metrics_port == 9464 and config.engine.snapshot_url
    assert security.tls_cert and security.tls_key and security.credentials and not security.insecure


def test_base_refuses_to_listen():
    found = render(MANIFESTS / "base")
    with pytest.raises(InvalidArgument, match="give --tls-cert and --credentials, or --insecure"):
        taken(serve_of(found)).check()
    assert any("--insecure" in problem for problem in problems(found, RAY))


@pytest.mark.parametrize("overlay", CLOSED)
def test_documented_overlays_require_credentials(overlay):
    given = options(serve_of(render(MANIFESTS / "overlays" / overlay)))
    assert {"tls-cert", "tls-key", "credentials", "health-port"} <= given.keys() and "insecure" not in given


def test_smallest_overlay_is_open_and_insecure():
    given = options(serve_of(render(MANIFESTS / "overlays" / "cpu")))
    assert "insecure" in given and not {"tls-cert", "credentials", "health-port", "metrics-port"} & given.keys()


def test_smallest_overlay_can_be_secured(small):
    assert list(all_errors(small)) == [] and problems(small, RAY) == []
    taken(serve_of(small)).check()


@pytest.mark.parametrize("name", ["certificates", "credentials", "authority", "monitoring"])
def test_single_component_keeps_the_rules(name, tmp_path):
    found = with_these(tmp_path, "cpu", [name])
    assert list(all_errors(found)) == [] and problems(found, RAY) == []


def test_hook_command_is_valid(whole):
    command = typer.main.get_command(app).commands["drain"]
    for container in head(whole)["containers"]:
        program, name, *words = hook(container)
        given = command.make_context(name, words).params
        assert (program, given["wait"], str(given["credential_file"])) == (
            "longleaf",
            True,
            "/etc/longleaf/credentials/drain",
        )
        assert given["server"] is None  # so localhost, for which the certificate is


def test_files_exist_in_the_named_secrets(whole):
    example = yaml.safe_load((MANIFESTS / "components" / "credentials" / "secret.example.yaml").read_text())
    assert list(all_errors([example])) == []
    certificate = named(whole, "Certificate", "longleaf")["spec"]["secretName"]
    found = {secret_file(head_pod(whole), container, path) for container, path in files_given(whole)}
    expected = {(certificate, key) for key in ("tls.crt", "tls.key", "ca.crt")}
    assert found == expected | {(example["metadata"]["name"], key) for key in example["stringData"]}


def test_secrets_are_readable_only_for_the_user_of_the_pod(whole):
    volumes = [one for one in head(whole)["volumes"] if "secret" in one]
    assert {one["name"] for one in volumes} == {"certificate", "credentials"}
    assert [one["secret"]["defaultMode"] for one in volumes] == [0o440, 0o440]
    assert head(whole)["securityContext"]["fsGroup"] == 1000


def test_example_credentials_grant_no_access(whole):
    example = yaml.safe_load((MANIFESTS / "components" / "credentials" / "secret.example.yaml").read_text())
    with pytest.raises(InvalidArgument, match="no entries"):
        parse_credentials(example["stringData"]["list"].encode())
    assert not of_kind(whole, "Secret")  # an applied Secret would replace the one that the operator created


def test_ranks_have_no_certificate_and_no_credential(whole):
    (group,) = cluster(whole)["workerGroupSpecs"]
    volumes = {one["name"] for one in group["template"]["spec"]["volumes"]}
    assert volumes.isdisjoint({"certificate", "credentials"})


def test_authority_signs_for_the_service(whole):
    issuer = named(whole, "Certificate", "longleaf")["spec"]["issuerRef"]["name"]
    secret = named(whole, "Issuer", issuer)["spec"]["ca"]["secretName"]
    (own,) = [one for one in of_kind(whole, "Certificate") if one["spec"]["secretName"] == secret]
    assert own["spec"]["isCA"] is True
    assert named(whole, "Issuer", own["spec"]["issuerRef"]["name"])["spec"] == {"selfSigned": {}}


def test_health_port_is_not_exposed_to_clients(whole):
    opened = {
        port["port"]
        for policy in of_kind(whole, "NetworkPolicy")
        for rule in policy["spec"].get("ingress", ())
        for port in rule.get("ports", ())
    }
    assert opened == {50051, 8000, 9464}
    assert {port["port"] for one in of_kind(whole, "Service") for port in one["spec"]["ports"]} == {50051, 8000}


def test_metrics_are_reachable_only_from_the_namespace_of_prometheus(whole):
    policy = named(whole, "NetworkPolicy", "longleaf-monitoring")["spec"]
    assert [pod.owner for pod in pods(whole) if selects(policy["podSelector"], pod)] == ["head", "longleaf-gateway"]
    (rule,) = policy["ingress"]
    (source,) = rule["from"]
    assert source == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def test_alerts_and_dashboard_equal_those_in_ops(whole):
    rules = yaml.safe_load((ROOT / "ops" / "prometheus" / "rules.yml").read_text())
    message = "k8s/components/monitoring/prometheusrule.yaml: its groups are not those of ops/prometheus/rules.yml"
    assert named(whole, "PrometheusRule", "longleaf")["spec"] == rules, message
    (dashboard,) = of_kind(whole, "ConfigMap")
    assert dashboard["data"] == {"longleaf.json": (ROOT / "ops" / "grafana" / "longleaf.json").read_text()}
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_readme_example_has_an_authority(tmp_path):
    found = of_readme(tmp_path)
    taken(serve_of(found)).check()
    assert of_kind(found, "Issuer") and of_kind(found, "PodMonitor")
    assert named(found, "Certificate", "longleaf")["spec"]["issuerRef"]["name"] == "internal"


def test_readme_shows_how_to_secure_the_smallest_overlay():
    output = (MANIFESTS / "README.md").read_text()
    (block,) = [one for one in output.split("```")[1::2] if one.startswith("\ncomponents:")]
    settings = yaml.safe_load(block)
    assert [Path(one).name for one in settings["components"]] == ["certificates", "credentials", "authority"]
    for patch, expected in zip(settings["patches"], CLOSING, strict=True):
        assert patch["target"] == expected["target"]
        assert yaml.safe_load(patch["patch"]) == yaml.safe_load(expected["patch"])


BREAKS = {
    "0.0.0.0 can be reached": lambda found: serve_of(found)["args"].remove(
        "--credentials=/etc/longleaf/credentials/list"
    ),
    "tls_cert: requires tls_key": lambda found: serve_of(found)["args"].remove(
        "--tls-key=/etc/longleaf/certificate/tls.key"
    ),
    "and need not": lambda found: serve_of(found)["args"].append("--insecure"),
    "ray-head: /etc/longleaf/certificate/tls.crt is of no Secret": lambda found: head(found)["containers"][0].update(
        volumeMounts=[
            one for one in head(found)["containers"][0]["volumeMounts"] if one["name"] in ("tmp", "credentials")
        ]
    ),
    "tls.pem is not in the Secret": lambda found: serve_of(found)["args"].append(
        "--tls-cert=/etc/longleaf/certificate/tls.pem"
    ),
    "its hook has ['credential-file']": lambda found: serve_of(found)["env"].remove(
        next(one for one in serve_of(found)["env"] if one["name"] == "LONGLEAF_TLS_CA")
    ),
    "its hook has ['tls-ca']": lambda found: hook(head(found)["containers"][0]).pop(),
    "is not for localhost": lambda found: named(found, "Certificate", "longleaf")["spec"]["dnsNames"].remove(
        "localhost"
    ),
    "is not for 127.0.0.1": lambda found: named(found, "Certificate", "longleaf")["spec"]["ipAddresses"].clear(),
    "is not for longleaf-headless": lambda found: named(found, "Certificate", "longleaf")["spec"]["dnsNames"].pop(),
    "is not a server's": lambda found: named(found, "Certificate", "longleaf")["spec"]["usages"].remove("server auth"),
    "0 certificates are written": lambda found: found.remove(named(found, "Certificate", "longleaf")),
    "has not the authority": lambda found: named(found, "BackendTLSPolicy", "longleaf")["spec"]["validation"].update(
        caCertificateRefs=[{"group": "", "kind": "Secret", "name": "other"}]
    ),
    "goes to ['longleaf'], and ['longleaf-gateway'] are encrypted": lambda found: found.remove(
        named(found, "BackendTLSPolicy", "longleaf")
    ),
    "Probe does not ask longleaf.v1.GenerationService at 50052": lambda found: serve_of(found)["readinessProbe"][
        "grpc"
    ].update(port=50051),
    "names ports [9464, 50051], not": lambda found: serve_of(found).update(
        ports=[one for one in serve_of(found)["ports"] if one["name"] != "health"]
    ),
    "as https": lambda found: named(found, "Service", "longleaf")["spec"]["ports"][0].update(
        appProtocol="kubernetes.io/h2c"
    ),
    "opens [50052]": lambda found: named(found, "NetworkPolicy", "longleaf-grpc-route")["spec"]["ingress"][0].update(
        ports=[{"protocol": "TCP", "port": 50052}]
    ),
    "more than a namespace": lambda found: named(found, "NetworkPolicy", "longleaf-monitoring")["spec"]["ingress"][
        0
    ].pop("from"),
    "opens [9464, 50051]": lambda found: named(found, "NetworkPolicy", "longleaf-clients")["spec"]["ingress"][0][
        "ports"
    ].append({"protocol": "TCP", "port": 9464}),
    "asks telemetry, which is []": lambda found: next(
        one for one in serve_of(found)["ports"] if one["name"] == "telemetry"
    ).update(name="metrics"),
    "PodMonitor longleaf: selects ['ranks']": lambda found: named(found, "PodMonitor", "longleaf")["spec"]["selector"][
        "matchExpressions"
    ][0].update(values=["ranks"]),
    "metrics are for its pod alone": lambda found: serve_of(found)["args"].remove("--metrics-host=0.0.0.0"),
    "0 PodMonitors": lambda found: found.remove(named(found, "PodMonitor", "longleaf")),
}


@pytest.mark.parametrize("reported", BREAKS)
def test_broken_rule_is_reported(reported, broken):
    assert problems(broken, RAY) == []
    BREAKS[reported](broken)
    assert reported in "\n".join(problems(broken, RAY))


TYPOS = {
    "dnsName": ("Certificate", lambda spec: spec.update(dnsName=spec.pop("dnsNames"))),
    "'always'": ("Certificate", lambda spec: spec["privateKey"].update(rotationPolicy="always")),
    "'90d'": ("Certificate", lambda spec: spec.update(duration="90d")),
    "'server'": ("Certificate", lambda spec: spec.update(usages=["server"])),
    "selfsigned": ("Issuer", lambda spec: spec.update(selfsigned={})),
    "podMetricEndpoints": ("PodMonitor", lambda spec: spec.update(podMetricEndpoints=[])),
    "'15 s'": ("PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].update(interval="15 s")),
    "alerts": ("PrometheusRule", lambda spec: spec["groups"][0].update(alerts=[])),
    "hostnames": ("BackendTLSPolicy", lambda spec: spec["validation"].update(hostnames=["longleaf"])),
}


@pytest.mark.parametrize("typo", TYPOS)
def test_typo_is_detected(typo, broken):
    kind, plant = TYPOS[typo]
    document = of_kind(broken, kind)[0]
    assert list(all_errors([document])) == []
    plant(document["spec"])
    (errors,) = all_errors([document])
    assert typo in errors
