"""Custom resource definitions for an API server, derived from schemas that were derived from the original definitions.

They lack the parts that the schemas leave out: rules in CEL, descriptions, status.
"""

import json
from pathlib import Path
from typing import Any

Document = dict[str, Any]


def definition(path: Path) -> Document:
    """The definition whose schema was kept in `path`."""
    schema = json.loads(path.read_text())
    group, _, version = schema["properties"].pop("apiVersion")["const"].partition("/")
    kind = schema["properties"].pop("kind")["const"]
    names = {"kind": kind, "singular": kind.lower(), "plural": f"{kind.lower()}s", "listKind": f"{kind}List"}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": structural(schema)}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names['plural']}.{group}",
            # groups below k8s.io belong to Kubernetes, and need an annotation with the approval
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [served]},
    }


def structural(schema: Document) -> Document:
    """The inverse of scripts/vendor_schemas.py: an API server refuses unknown fields itself on request, and does not
    accept the rule in a schema."""
    found = {name: value for name, value in schema.items() if (name, value) != ("additionalProperties", False)}
    if "anyOf" in found:
        found["x-kubernetes-int-or-string"] = True
    if isinstance(found.get("type"), list):
        found |= {"type": found["type"][0], "nullable": True}
    for name in ("items", "additionalProperties"):
        if name in found:
            found[name] = structural(found[name])
    if "properties" in found:
        found["properties"] = {name: structural(inner) for name, inner in found["properties"].items()}
    return found
