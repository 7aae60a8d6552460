"""Random JSON schemas, and whether text satisfies them."""

import random
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "size", "kind", "tags", "owner", "state", "count", "note")


def random_schema(number: int, depth: int = 3) -> Schema:
    """Schema number `number`: an object of bounded values, as applications request it."""
    source = random.Random(number)
    return _object(source, depth)


def _object(source: random.Random, depth: int) -> Schema:
    names = source.sample(WORDS, source.randint(1, 4))
    required = [name for name in names if source.random() < 0.8]
    properties = {name: _value(source, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(source: random.Random, depth: int) -> Schema:
    kinds = ["integer", "string", "boolean", "enum", "pattern", "number", "nullable", "format"]
    if depth > 0:
        kinds += ["object", "array", "any"] * 2
    match source.choice(kinds):
        case "integer":
            low = source.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 500)}
        case "string":
            return {"type": "string", "minLength": source.randint(0, 2), "maxLength": source.randint(2, 8)}
        case "boolean":
            return {"type": "boolean"}
        case "enum":
            values: list[object] = [*source.sample(WORDS, 3), None, 7, True]
            return {"enum": source.sample(values, source.randint(1, 4))}
        case "pattern":
            return {"type": "string", "pattern": source.choice(("^[a-z]{1,4}$", r"^\d{2}-\d{2}$", "^(a|bc)+x{0,3}$"))}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": 10}
        case "nullable":
            return {"type": ["boolean", "null"]}
        case "format":
            return {"type": "string", "format": source.choice(("date", "uuid", "time"))}
        case "object":
            return _object(source, depth)
        case "array":
            most = source.randint(0, 3)
            return {"type": "array", "items": _value(source, depth - 1), "minItems": min(1, most), "maxItems": most}
        case _:
            return {"anyOf": [_value(source, depth - 1) for _ in range(2)]}
