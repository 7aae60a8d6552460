"""The pods that manifests make."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Document = dict[str, Any]
GATEWAY = "longleaf-gateway"
"""The name of the gateways' Deployment and Service."""


class Pod(NamedTuple):
    """A pod template: its owner and its content."""

    owner: str
    template: Document

    @property
    def labels(self) -> dict[str, str]:
        return self.template.get("metadata", {}).get("labels", {})

    @property
    def spec(self) -> Document:
        return self.template["spec"]

    def containers(self) -> list[Document]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    def container(self, name: str) -> Document:
        return next(one for one in self.containers() if one["name"] == name)


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    return [one for one in documents if one["kind"] == kind]


def cluster(documents: Sequence[Document]) -> Document:
    """The only RayCluster's spec."""
    (found,) = of_kind(documents, "RayCluster")
    return found["spec"]


def groups(documents: Sequence[Document]) -> dict[str, Document]:
    """Groups of Ray's nodes by name, the head's too."""
    spec = cluster(documents)
    return {"head": spec["headGroupSpec"]} | {group["groupName"]: group for group in spec["workerGroupSpecs"]}


def pods(documents: Sequence[Document]) -> list[Pod]:
    """All templates of pods."""
    return list(_pods(documents))


def _pods(documents: Sequence[Document]) -> Iterator[Pod]:
    for one in of_kind(documents, "RayCluster"):
        yield from (Pod(name, group["template"]) for name, group in groups([one]).items())
    for one in (*of_kind(documents, "Deployment"), *of_kind(documents, "Job")):
        yield Pod(one["metadata"]["name"], one["spec"]["template"])


def environment(container: Document) -> dict[str, str]:
    """Variables whose values stand in the manifest."""
    return {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}


def options(container: Document) -> dict[str, str]:
    """The `--name=value` options, with variables replaced by their values from the manifest."""
    words = [word for word in (*container.get("command", ()), *container.get("args", ())) if word.startswith("--")]
    found = dict(word.removeprefix("--").partition("=")[::2] for word in words)
    for name, value in environment(container).items():
        found = {option: text.replace(f"$({name})", value) for option, text in found.items()}
    return found


def selects(selector: Document, pod: Pod) -> bool:
    """Whether a selector, of labels or with expressions, matches the pod."""
    is_plain = not selector.keys() & {"matchLabels", "matchExpressions"}
    wanted = selector if is_plain else selector.get("matchLabels", {})
    expressions = () if is_plain else selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    return wanted.items() <= pod.labels.items() and all(
        pod.labels.get(one["key"]) in one["values"] for one in expressions
    )


def gateway_of(documents: Sequence[Document]) -> Pod | None:
    """The pods that answer HTTP, if there are some."""
    return next((pod for pod in pods(documents) if pod.owner == GATEWAY), None)


def serve_of(documents: Sequence[Document]) -> Document:
    """The container that starts the service."""
    return next(pod for pod in pods(documents) if pod.owner == "head").container("serve")
