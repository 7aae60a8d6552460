"""Turns custom resource definitions into the schemas against which tests check manifests: vendor_schemas.py CRD.yaml
...

Descriptions and rules in CEL (`x-kubernetes-validations`) are omitted. Fields that the definition does not have are
refused; an API server does so only in strict mode.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "support" / "manifests" / "schemas"
KEYWORDS = ("type", "enum", "required", "pattern", "format", "default", "minimum", "maximum", "minLength", "maxLength")
LIST_KEYWORDS = ("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties")
INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a structural schema; it refuses unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        return INT_OR_STRING | ({"pattern": schema["pattern"]} if "pattern" in schema else {})
    found: dict[str, Any] = {name: schema[name] for name in (*KEYWORDS, *LIST_KEYWORDS) if name in schema}
    if schema.get("nullable"):
        found["type"] = [schema["type"], "null"]
    if "items" in schema:
        found["items"] = strict(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = strict(schema["additionalProperties"])
    if "properties" in schema:
        found["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
        found["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return found


def of_definition(definition: dict[str, Any]) -> dict[str, Any]:
    """The schema of the version that the API server stores. An object's own name and labels are any object's."""
    version = next(one for one in definition["spec"]["versions"] if one["storage"])
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["apiVersion"] = {"const": f"{definition['spec']['group']}/{version['name']}"}
    schema["properties"]["kind"] = {"const": definition["spec"]["names"]["kind"]}
    schema["properties"]["metadata"] = {"type": "object"}
    schema["properties"].pop("status", None)
    return schema


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        for definition in yaml.safe_load_all(path.read_text()):
            written = FOLDER / f"{definition['spec']['names']['singular']}.json"
            written.write_text(json.dumps(of_definition(definition), separators=(",", ":"), sort_keys=True) + "\n")
            print(f"{written.name}: {written.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
