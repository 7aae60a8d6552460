"""The responses of a real API server to the manifests, where KUBEBUILDER_ASSETS names one: unknown fields, Pod
Security."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests.api_server import ApiServer, assets
from tests.support.manifests.definitions import definition
from tests.support.manifests.pods import cluster, pods
from tests.support.manifests.rendering import MANIFESTS, render, with_components
from tests.support.manifests.validation import SCHEMAS

pytestmark = pytest.mark.timeout(300)
Document = dict[str, Any]
OVERLAYS = sorted(path.parent.name for path in (MANIFESTS / "overlays").glob("*/kustomization.yaml"))
APPLY = ("apply", "--server-side", "--validate=strict", "--filename=-")
CREATE = ("create", "--validate=strict", "--filename=-")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(assets(), tmp_path_factory.mktemp("api")) as running:
        definitions = [definition(path) for path in sorted(SCHEMAS.glob("*.json"))]
        names = [f"customresourcedefinition/{one['metadata']['name']}" for one in definitions]
        done = running.kubectl(*APPLY, documents=definitions)
        assert done.returncode == 0, done.stderr
        done = running.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)
        assert done.returncode == 0, done.stderr
        yield running


@pytest.fixture
def inside(server: ApiServer, tmp_path: Path) -> Callable[..., str]:
    """Runs kubectl in a separate namespace that admits only restricted pods; returns the errors."""
    name = tmp_path.name.lower().replace("_", "-")
    labelled = {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    done = server.kubectl(*APPLY, documents=[{"apiVersion": "v1", "kind": "Namespace", "metadata": labelled}])
    assert done.returncode == 0, done.stderr

    def call(*arguments: str, documents: list[Document]) -> str:
        done = server.kubectl("--namespace", name, *arguments, documents=documents)
        return done.stderr if done.returncode else ""

    return call


def pod_of(owner: str, template: Document) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": template["metadata"] | {"name": owner},
        "spec": template["spec"],
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_and_its_pods_are_accepted(overlay, inside):
    found = render(MANIFESTS / "overlays" / overlay)
    assert inside(*APPLY, documents=found) == ""
    assert inside(*CREATE, documents=[pod_of(*pod) for pod in pods(found)]) == ""


def test_components_and_their_pods_are_accepted(tmp_path, inside):
    found = [one for one in with_components(tmp_path, "gpu-2x8") if one["kind"] != "BackendTrafficPolicy"]
    assert inside(*APPLY, documents=found) == ""
    assert inside(*CREATE, documents=[pod_of(*pod) for pod in pods(found)]) == ""


def test_pod_that_may_run_as_root_is_refused(inside):
    found = render(MANIFESTS / "overlays" / "cpu")
    assert inside(*APPLY, documents=found) == ""
    pod = copy.deepcopy(pod_of(*pods(found)[0]))
    pod["spec"]["securityContext"]["runAsNonRoot"] = False
    reported = inside(*CREATE, documents=[pod])
    assert 'violates PodSecurity "restricted' in reported and "runAsNonRoot" in reported


def test_unknown_field_is_refused(inside):
    found = render(MANIFESTS / "overlays" / "cpu")
    cluster(found)["workerGroupSpecs"][0]["replicass"] = 2
    assert "replicass" in inside(*APPLY, documents=found)
