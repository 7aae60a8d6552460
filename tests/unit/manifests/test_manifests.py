"""The Kubernetes manifests: validated against schemas and project rules, and with deliberate faults. Needs no tool."""

import copy
import json
import re
import tomllib
from pathlib import Path

import pytest
from vendor_schemas import of_definition

import longleaf
from tests.support.manifests.definitions import definition
from tests.support.manifests.pods import cluster, environment, of_kind, options, pods, selects
from tests.support.manifests.rendering import of_readme, render, with_components, with_these
from tests.support.manifests.rules import problems
from tests.support.manifests.validation import KUBERNETES, SCHEMAS, all_errors

ROOT = Path(__file__).resolve().parents[3]
OVERLAYS = {path.parent.name: path.parent for path in sorted((ROOT / "k8s" / "overlays").glob("*/kustomization.yaml"))}
RAY = re.search(r"^ray==(.+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE).group(1)
RENDERED = {name: render(folder) for name, folder in OVERLAYS.items()}


@pytest.fixture(params=OVERLAYS)
def documents(request):
    return RENDERED[request.param]


@pytest.fixture
def broken():
    """An overlay that a test may break."""
    return copy.deepcopy(RENDERED["gpu-2x8"])


def test_all_sizes_in_the_readme_exist():
    assert set(OVERLAYS) == {"cpu", "gpu-1x8", "gpu-1x8-70b", "gpu-2x8", "gpu-2x8-405b"}


def test_every_document_is_valid_for_its_kind(documents):
    assert list(all_errors(documents)) == []


def test_every_rule_holds(documents):
    assert problems(documents, RAY) == []


def test_readme_names_the_versions_of_the_schemas():
    output = (ROOT / "k8s" / "README.md").read_text()
    assert f"Kubernetes {KUBERNETES} or newer" in output
    (kuberay,) = re.findall(r"kuberay v(\d+\.\d+)\.\d+", (SCHEMAS / "README.md").read_text())
    assert f"[KubeRay](https://github.com/ray-project/kuberay) {kuberay}" in output


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.json")), ids=lambda path: path.stem)
def test_schemas_and_definitions_agree(path):
    made = definition(path)
    assert list(all_errors([made])) == []
    assert of_definition(made) == json.loads(path.read_text())


def test_images_have_this_version(documents):
    tags = {container["image"].rpartition(":")[2] for pod in pods(documents) for container in pod.containers()}
    assert {tag.partition("-")[0] for tag in tags} == {longleaf.__version__}


def test_images_get_every_package_of_the_wheel():
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    stages = re.split(r"^FROM ", (ROOT / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    copied = [set(re.findall(r"^COPY (\w+) \w+$", stage, re.MULTILINE)) for stage in stages]
    assert [names for names in copied if names] == [set(packages)] * 2
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in packages} <= set(context)


@pytest.mark.parametrize(("overlay", "billions", "num_ranks"), [("gpu-1x8-70b", 70.6, 8), ("gpu-2x8-405b", 405.9, 16)])
def test_large_models_are_sharded_over_all_ranks(overlay, billions, num_ranks):
    documents = RENDERED[overlay]
    values = environment(serve(documents))
    assert (values["WEIGHTS"], values["WORLD_SIZE"], values["DEVICE"]) == ("sharded", str(num_ranks), "cuda")
    assert 2 * billions / num_ranks < 0.7 * 80  # GB of a GPU, in bfloat16
    (claim,) = (
        one for one in of_kind(documents, "PersistentVolumeClaim") if one["metadata"]["name"].endswith("models")
    )
    assert 2e9 * billions < int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * 2**30


def test_number_of_gpu_hosts_equals_number_of_pods():
    (group,) = cluster(RENDERED["gpu-2x8"])["workerGroupSpecs"]
    (spread,) = group["template"]["spec"]["topologySpreadConstraints"]
    wanted = ("kubernetes.io/hostname", 1, "DoNotSchedule")
    assert (spread["topologyKey"], spread["maxSkew"], spread["whenUnsatisfiable"]) == wanted


def head(documents):
    return cluster(documents)["headGroupSpec"]["template"]["spec"]


def ranks(documents):
    return cluster(documents)["workerGroupSpecs"][0]


def serve(documents):
    return head(documents)["containers"][1]


def document(documents, kind):
    return of_kind(documents, kind)[0]


@pytest.fixture
def whole(tmp_path):
    """An overlay with all components, as a user writes one."""
    return with_components(tmp_path, "gpu-2x8")


def test_components_keep_the_rules(whole):
    assert list(all_errors(known(whole))) == []
    assert problems(whole, RAY) == []
    assert {"GRPCRoute", "Job"} <= {one["kind"] for one in known(whole)}


def known(documents):
    """The documents with a known schema: all except those of Envoy Gateway."""
    return [one for one in documents if one["kind"] != "BackendTrafficPolicy"]


def test_readme_example_keeps_the_rules(tmp_path):
    """Includes all its changes: a patch that removes entries by replacing a list is detected."""
    found = of_readme(tmp_path)
    assert list(all_errors(known(found))) == []
    assert problems(found, RAY) == []
    assert {one["metadata"]["namespace"] for one in found} == {"longleaf"}
    assert options(serve(found))["world-size"] == "32" and ranks(found)["replicas"] == 4
    (prefetch,) = document(found, "Job")["spec"]["template"]["spec"]["containers"]
    assert environment(prefetch)["URL"] == "https://models.internal/Qwen3-8B"
    assert options(serve(found))["model"] == environment(prefetch)["MODEL"]
    assert document(found, "GRPCRoute")["spec"]["parentRefs"] == [{"name": "edge", "namespace": "edge-system"}]
    assert options(serve(found))["snapshot-url"] == "s3://keys/longleaf"


def test_pods_with_snapshots_have_the_storage_credentials(tmp_path):
    whole = with_these(tmp_path, "gpu-2x8", ["snapshots", "prefetch"])
    assert options(serve(whole)) == options(serve(RENDERED["gpu-2x8"])) | {"snapshot-url": "s3://bucket/longleaf"}
    (container,) = ranks(whole)["template"]["spec"]["containers"]
    for one in (*head(whole)["containers"], container):
        assert one["envFrom"] == [{"secretRef": {"name": "longleaf-snapshots"}}]
    (prefetch,) = document(whole, "Job")["spec"]["template"]["spec"]["containers"]
    assert "envFrom" not in prefetch
    (policy,) = [one for one in of_kind(whole, "NetworkPolicy") if one["metadata"]["name"] == "longleaf-snapshots"]
    assert {pod.owner for pod in pods(whole) if selects(policy["spec"]["podSelector"], pod)} == {"head", "ranks"}
    assert policy["spec"]["egress"] == [{"ports": [{"protocol": "TCP", "port": 443}]}]


def test_base_overlay_uses_no_storage(documents):
    assert "snapshot-url" not in options(serve(documents))
    assert not any("envFrom" in container for pod in pods(documents) for container in pod.containers())


def test_route_leads_to_the_service_and_has_no_timeout(whole):
    from longleaf.v1 import cluster_service_pb2, context_service_pb2, generation_service_pb2, tokenizer_service_pb2

    files = (cluster_service_pb2, context_service_pb2, generation_service_pb2, tokenizer_service_pb2)
    found = {one.full_name: one for file in files for one in file.DESCRIPTOR.services_by_name.values()}
    (rule,) = document(whole, "GRPCRoute")["spec"]["rules"]
    for match in rule["matches"]:
        method = match["method"]
        assert "method" not in method or method["method"] in found[method["service"]].methods_by_name
    assert {match["method"]["service"] for match in rule["matches"]} == set(found)
    allowed = [match["method"] for match in rule["matches"] if "Cluster" in match["method"]["service"]]
    assert {method["method"] for method in allowed} == {"GetCluster", "WatchCluster"}


TYPOS = {
    "imagee": lambda found: serve(found).update(imagee=serve(found).pop("image")),
    "workerGroupSpecss": lambda found: cluster(found).update(workerGroupSpecss=cluster(found).pop("workerGroupSpecs")),
    "replicas": lambda found: ranks(found).update(replicas="two"),
    "preStopp": lambda found: serve(found)["lifecycle"].update(preStopp=serve(found)["lifecycle"].pop("preStop")),
    "appProtocl": lambda found: document(found, "Service")["spec"]["ports"][0].update(appProtocl="h2c"),
    "podSelecter": lambda found: document(found, "NetworkPolicy")["spec"]["ingress"][0]["from"][0].update(
        podSelecter={}
    ),
    "minAvailible": lambda found: document(found, "PodDisruptionBudget")["spec"].update(minAvailible=3),
    "apiVersion": lambda found: document(found, "RayCluster").update(apiVersion="ray.io/v1beta1"),
    "'2 cores'": lambda found: serve(found)["resources"]["limits"].update(cpu="2 cores"),
    "secretKeyReff": lambda found: serve(found)["env"].append(
        {"name": "X", "valueFrom": {"secretKeyReff": {"name": "longleaf", "key": "auth_token"}}}
    ),
    "secretReff": lambda found: serve(found).update(envFrom=[{"secretReff": {"name": "longleaf-snapshots"}}]),
    "storge": lambda found: document(found, "PersistentVolumeClaim")["spec"].update(storge="1Gi"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("typo", TYPOS)
def test_typo_is_detected(typo, broken):
    TYPOS[typo](broken)
    (errors,) = all_errors(broken)
    assert typo in errors


BREAKS = {
    "no tag of a version": lambda found: serve(found).update(image="longleaf:latest"),
    "different images": lambda found: serve(found).update(image="longleaf:0.1.0-cpu"),
    "no limit of memory": lambda found: serve(found)["resources"]["limits"].pop("memory"),
    "may gain privileges": lambda found: serve(found)["securityContext"].pop("allowPrivilegeEscalation"),
    "keeps capabilities": lambda found: serve(found)["securityContext"].update(capabilities={"add": ["IPC_LOCK"]}),
    "may write to its root": lambda found: serve(found)["securityContext"].pop("readOnlyRootFilesystem"),
    "runAsNonRoot is not True": lambda found: head(found)["securityContext"].pop("runAsNonRoot"),
    "head: hostNetwork": lambda found: head(found).update(hostNetwork=True),
    "is a hostPath": lambda found: head(found)["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    "gets a token": lambda found: head(found).pop("automountServiceAccountToken"),
    "Ray would run in serve": lambda found: head(found)["containers"].reverse(),
    "no volume shm": lambda found: head(found)["volumes"].remove(
        next(one for one in head(found)["volumes"] if one["name"] == "shm")
    ),
    "no claim longleaf-models": lambda found: found.remove(document(found, "PersistentVolumeClaim")),
    "readinessProbe does not ask": lambda found: serve(found)["readinessProbe"]["grpc"].update(service=""),
    "less than an hour": lambda found: serve(found)["startupProbe"].update(failureThreshold=10),
    "would give up and say why": lambda found: serve(found)["args"].append("--wait-for-ranks=3600"),
    "not gRPC at 50051": lambda found: document(found, "Service")["spec"]["ports"][0].update(port=50052),
    "opens [8265, 50051]": lambda found: of_kind(found, "NetworkPolicy")[1]["spec"]["ingress"][0]["ports"].append(
        {"protocol": "TCP", "port": 8265}
    ),
    "Service longleaf: selects no pod": lambda found: document(found, "Service")["spec"]["selector"].update(x="y"),
    "is not spread": lambda found: ranks(found)["template"]["metadata"]["labels"].update(
        {"app.kubernetes.io/component": "rank"}
    ),
    "head has no grpc": lambda found: serve(found)["ports"][1].update(name="rpc"),
    "head: has slots": lambda found: cluster(found)["headGroupSpec"]["rayStartParams"].pop("num-gpus"),
    "and 24 slots": lambda found: ranks(found).update(replicas=3),
    "its size is not fixed": lambda found: ranks(found).update(maxReplicas=5),
    "tells Ray of 4 GPUs": lambda found: ranks(found)["rayStartParams"].update({"num-gpus": "4"}),
    "fewer processors than slots": lambda found: ranks(found)["rayStartParams"].update({"num-cpus": "64"}),
    "minAvailable is not 3": lambda found: document(found, "PodDisruptionBudget")["spec"].update(minAvailable="50%"),
    "twice --drain-seconds": lambda found: head(found).update(terminationGracePeriodSeconds=30),
    "ends without a hook": lambda found: serve(found).pop("lifecycle"),
    "do not share their processes": lambda found: head(found).pop("shareProcessNamespace"),
    "Ray asks for no token": lambda found: cluster(found).pop("authOptions"),
    "has not the token of its Ray": lambda found: serve(found)["env"].remove(
        next(one for one in serve(found)["env"] if one["name"] == "RAY_AUTH_TOKEN")
    ),
    "ClusterRole all": lambda found: found.append({"kind": "ClusterRole", "metadata": {"name": "all"}}),
    "rayVersion is 2.52.0": lambda found: cluster(found).update(rayVersion="2.52.0"),
}


@pytest.mark.parametrize("reported", BREAKS)
def test_broken_rule_is_reported(reported, broken):
    BREAKS[reported](broken)
    assert reported in "\n".join(problems(broken, RAY))
