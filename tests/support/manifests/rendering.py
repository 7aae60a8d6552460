"""Renders a folder of manifests without kustomize, with the features that the manifests use.

Strategic merge patches, whose lists are merged by the keys that an openapi schema names; JSON patches with a target;
components; names of images; ConfigMaps of files. Unsupported fields raise KeyError. A test compares the output with
that of kustomize.
"""

import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.manifests.json_patch import patched

Document = dict[str, Any]
PATCH = "$patch"
MANIFESTS = Path(__file__).resolve().parents[3] / "k8s"
CLOSING: tuple[Document, ...] = (
    {
        "patch": """
- {op: test, path: /spec/headGroupSpec/template/spec/containers/1/args/12, value: --insecure}
- {op: remove, path: /spec/headGroupSpec/template/spec/containers/1/args/12}
""",
        "target": {"kind": "RayCluster", "name": "longleaf"},
    },
    {
        "patch": """
- {op: test, path: /spec/template/spec/containers/0/args/8, value: --insecure}
- {op: remove, path: /spec/template/spec/containers/0/args/8}
""",
        "target": {"kind": "Deployment", "name": "longleaf-gateway"},
    },
)
"""Removes the settings that leave the smallest overlay open, as k8s/README.md describes."""
KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "configMapGenerator",
    "components",
    "images",
    "patches",
    "openapi",
}


def render(folder: Path) -> list[Document]:
    """The documents that a kustomization gives, in the order in which they are named."""
    return _Renderer().render(folder, [])


def documents(text: str) -> list[Document]:
    """The documents of a YAML stream; a node with an alias appears twice."""
    return json.loads(_as_json(text))


@cache
def _as_json(text: str) -> str:
    """Cached: parsing dominates rendering time."""
    return json.dumps([one for one in yaml.load_all(text, yaml.CSafeLoader) if one])


def with_components(folder: Path, overlay: str) -> list[Document]:
    """Writes a kustomization of an overlay and those of all components that it has not, and renders it."""
    there = components_of(MANIFESTS / "overlays" / overlay)
    paths = sorted(path.parent for path in (MANIFESTS / "components").glob("*/kustomization.yaml"))
    return with_these(folder, overlay, [path.name for path in paths if path.name not in there])


def with_these(
    folder: Path, overlay: str, components: Sequence[str], patches: Sequence[Document] = ()
) -> list[Document]:
    """Writes a kustomization of an overlay, components and patches, and renders it."""
    settings: Document = {"resources": [os.path.relpath(MANIFESTS / "overlays" / overlay, folder)]}
    settings |= {"components": [os.path.relpath(MANIFESTS / "components" / name, folder) for name in components]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(settings | {"patches": list(patches)}))
    return render(folder)


def components_of(folder: Path) -> set[str]:
    """Names of the components that a kustomization has, or one that it is made of."""
    settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found = {Path(name).name for name in settings.get("components", ())}
    below = [folder / name for name in settings.get("resources", ())]
    return found.union(*(components_of(path) for path in below if path.is_dir()))


def of_readme(folder: Path) -> list[Document]:
    """Writes the overlay of k8s/README.md with all its parts, and renders it."""
    settings: Document = {}
    for block in re.findall("```yaml\n(.*?)```", (MANIFESTS / "README.md").read_text(), re.DOTALL):
        reported = yaml.safe_load(block.replace("../k8s", os.path.relpath(MANIFESTS, folder)))
        for name, value in reported.items():
            settings[name] = settings.get(name, []) + value if isinstance(value, list) else value
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(settings))
    return render(folder)


class _Renderer:
    def __init__(self) -> None:
        self._schema: Document = {}
        """If several kustomizations name a schema, the last one counts, as with kustomize."""

    def render(self, folder: Path, found: list[Document]) -> list[Document]:
        """Adds the resources and applies the changes of a kustomization to `found`."""
        settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
        if unknown := settings.keys() - KNOWN:
            raise KeyError(f"{folder}: {', '.join(sorted(unknown))}")
        for name in settings.get("resources", ()):
            path = folder / name
            found = self.render(path, found) if path.is_dir() else found + documents(path.read_text())
        found = found + [_config_map(folder, one) for one in settings.get("configMapGenerator", ())]
        if "openapi" in settings:
            self._schema = json.loads((folder / settings["openapi"]["path"]).read_text())["definitions"]
        for name in settings.get("components", ()):
            found = self.render(folder / name, found)
        for patch in settings.get("patches", ()):
            text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
            if "target" in patch:
                found = _by_operations(found, patch["target"], yaml.safe_load(text))
                continue
            for change in documents(text):
                found = self._patch(found, change)
        for one in found if "namespace" in settings else ():
            one["metadata"]["namespace"] = settings["namespace"]
        for image in settings.get("images", ()):
            _rename(found, image)
        return found

    def _patch(self, found: list[Document], change: Document) -> list[Document]:
        index = [_identity(one) for one in found].index(_identity(change))
        schema = next((one for one in self._schema.values() if _is_of(one, change)), {})
        patched = self._merge(found[index], change, schema)
        return [*found[:index], *([] if patched is None else [patched]), *found[index + 1 :]]

    def _merge(self, old: Any, new: Any, schema: Document) -> Any:
        """None where the patch deletes."""
        if isinstance(new, dict) and isinstance(old, dict):
            if new.get(PATCH) == "delete":
                return None
            schema = self._schema[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
            inner = schema.get("properties", {})
            merged = {name: self._merge(old.get(name), value, inner.get(name, {})) for name, value in new.items()}
            return {name: value for name, value in (old | merged).items() if value is not None}
        key = schema.get("x-kubernetes-patch-merge-key")
        if key is None or not isinstance(old, list) or not isinstance(new, list):
            return new
        return self._merge_list(old, new, key, schema["items"])

    def _merge_list(
        self, old: list[Document], new: list[Document], key: str, schema: Document
    ) -> list[Document] | None:
        """The items that a patch names come first, in its order, as with kustomize."""
        by_key = {one[key]: one for one in old}
        merged = [self._merge(by_key.pop(one[key], {}), one, schema) for one in new]
        return [*(one for one in merged if one is not None), *by_key.values()] or None


def _config_map(folder: Path, generator: Document) -> Document:
    """Files of a folder under their names, with no hash behind the ConfigMap's own."""
    if generator["options"].get("disableNameSuffixHash") is not True or generator.keys() - {"name", "files", "options"}:
        raise KeyError(generator["name"])
    metadata = {"name": generator["name"], "labels": generator["options"]["labels"]}
    data = {name: (folder / name).read_text() for name in generator["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _by_operations(found: list[Document], target: dict[str, str], operations: list[Document]) -> list[Document]:
    """Applies a JSON patch to all documents of a kind, or to the named one. Raises KeyError if none matches."""
    if unknown := target.keys() - {"kind", "name"}:
        raise KeyError(f"target: {', '.join(sorted(unknown))}")
    named = [one["kind"] == target["kind"] and target.get("name") in (None, one["metadata"]["name"]) for one in found]
    if not any(named):
        raise KeyError(str(target))
    return [patched(one, operations) if is_named else one for one, is_named in zip(found, named, strict=True)]


def _identity(document: Document) -> tuple[str, str, str]:
    return document["apiVersion"], document["kind"], document["metadata"]["name"]


def _is_of(schema: Document, document: Document) -> bool:
    kinds = schema.get("x-kubernetes-group-version-kind", ())
    return any((f"{one['group']}/{one['version']}", one["kind"]) == _identity(document)[:2] for one in kinds)


def _rename(found: Any, image: dict[str, str]) -> None:
    """Gives the image of this name its tag, and its new name if there is one, in all containers."""
    if isinstance(found, dict) and str(found.get("image", "")).partition(":")[0] == image["name"]:
        found["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
    for inner in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        _rename(inner, image)
