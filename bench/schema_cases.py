"""JSON schemas to constrain answers: one for each feature in JSON-Schema-Test-Suite, parameters of ordinary tools, and
any number of random ones from a seed."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any] | bool

INT: Schema = {"type": "integer"}
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}

# in the order of the suite's file names
SUITE: list[Schema] = [
    {"type": "object", "properties": {"foo": {}, "bar": {}}, "additionalProperties": False},
    {"type": "object", "properties": {"foo": INT}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^v[0-9]$": INT}, "additionalProperties": False},
    {"allOf": [{"type": "object", "properties": {"bar": INT}, "required": ["bar"]}, {"required": ["foo"]}]},
    {"allOf": [{"type": "integer", "maximum": 30}, {"minimum": 20}]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 2}]},
    {"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]},
    {"anyOf": [{"type": "object", "properties": {"bar": INT}, "required": ["bar"]}, {"type": "null"}]},
    True,
    {"const": 2},
    {"const": {"foo": "bar", "baz": [1, None, "\u00e9\"\\"]}},
    {"const": [{"a": False}]},
    {"const": "\n\t\u0001"},
    {"type": "integer", "default": 5, "description": "has a default", "title": "t", "examples": [1]},
    {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    {"enum": [1, 2, 3]},
    {"enum": [6, "foo", [], True, {"foo": 12}]},
    {"enum": ["a\nb", "a\rb", "\u2028"]},
    {"type": "object", "properties": {"foo": {"enum": ["foo"]}, "bar": {"enum": ["bar"]}}, "required": ["bar"]},
    {"type": "number", "exclusiveMaximum": 3.0, "minimum": 1},
    {"type": "number", "exclusiveMinimum": 1.1, "maximum": 9},
    {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "prefixItems": [INT, {"type": "string"}], "items": False},
    {"type": "array", "prefixItems": [INT], "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": INT, "minItems": 1, "maxItems": 2},
    {"type": "array", "maxItems": 0},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "maxLength": 0},
    {"type": "number", "maximum": 3.0, "minimum": 1.5},
    {"type": "integer", "minimum": 1, "maximum": 1},
    {"type": "integer", "minimum": -1000000000000, "maximum": 999999999999},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 100},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [{"const": "a"}, {"const": "b"}]},
    {"type": "string", "pattern": "^a*$"},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    {"type": "string", "pattern": "a+"},
    {"type": "object", "patternProperties": {"f.*o": INT}, "additionalProperties": False},
    {"type": "object", "properties": {"foo\nbar": INT, "foo\"bar": INT, "foo\\bar": INT}, "required": ["foo\"bar"]},
    {"type": "object", "properties": {"__proto__": INT, "toString": {"type": "boolean"}}, "required": ["__proto__"]},
    {"type": "object", "properties": {"$ref": {"type": "string"}}, "required": ["$ref"]},
    {"type": "object", "required": ["foo", "bar"]},
    {"type": "object", "properties": {"foo": {}}, "required": ["foo"]},
    {"$defs": {"a": INT, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/b"},
    {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": ["integer", "string"]},
    {"type": ["array", "object", "null"]},
    {"type": "null"},
    {"type": "boolean"},
    {"type": "number"},
    {"type": "object", "minProperties": 1, "properties": {"a": INT}, "required": ["a"]},
    {"type": "object", "maxProperties": 2},
    {"type": "object", "properties": {"a": False, "b": INT}},
]  # fmt: skip


def _tool(required: str, /, **properties: Any) -> Schema:
    """Return a tool's parameter schema; required: names separated by spaces."""
    described = {name: {"type": value} if isinstance(value, str) else value for name, value in properties.items()}
    return {"type": "object", "properties": described, "required": required.split(), "additionalProperties": False}


PLACE = {"type": "string", "description": "City and country"}
LEVEL = {"enum": ["low", "medium", "high"]}
NAMES = {"type": "array", "items": {"type": "string"}, "maxItems": 5}
TOOLS: list[Schema] = [
    _tool("location", location=PLACE, unit={"enum": ["celsius", "fahrenheit"]}),
    _tool("query", query="string", max_results={"type": "integer", "minimum": 1, "maximum": 50}),
    _tool("path", path="string", start_line="integer", end_line="integer"),
    _tool("path content", path="string", content="string", append="boolean"),
    _tool("expression", expression={"type": "string", "pattern": "^[0-9+*/ ().-]+$"}),
    _tool("to subject body", to=NAMES, subject={"type": "string", "maxLength": 80}, body="string", cc=NAMES),
    _tool("title start", title="string", start={"type": "string", "format": "date-time"}, guests=NAMES),
    _tool("origin destination date", origin=PLACE, destination=PLACE, date={"type": "string", "format": "date"}),
    _tool("symbol", symbol={"type": "string", "pattern": "^[A-Z]{1,5}$"}, days={"type": "integer", "minimum": 1}),
    _tool("amount currency", amount={"type": "number", "exclusiveMinimum": 0}, currency={"enum": ["EUR", "USD"]}),
    _tool("sql", sql="string", parameters={"type": "array", "items": {"type": ["string", "number", "null"]}}),
    _tool("issue", issue="integer", labels=NAMES, state={"enum": ["open", "closed"]}, priority=LEVEL),
    _tool("lamp on", lamp="integer", on="boolean", brightness={"type": "integer", "minimum": 0, "maximum": 100}),
    _tool("text target", text="string", target={"type": "string", "pattern": "^[a-z]{2}$"}, formal="boolean"),
    _tool("", limit="integer", cursor={"type": ["string", "null"]}),
    _tool("url", url={"type": "string", "pattern": "^https?://[a-z]+\\.[a-z]{2,4}/?$"}, timeout_s="number"),
    _tool("cart", cart={"type": "array", "minItems": 1, "maxItems": 3, "items": _tool("id", id="string", n="number")}),
    _tool("user", user=_tool("name", name="string", email={"type": "string", "format": "email"}, age="integer")),
    _tool("filter", filter={"anyOf": [_tool("eq", eq="string"), _tool("min", min="number", max="number")]}),
    _tool("points", points={"type": "array", "maxItems": 3, "items": {"type": "array", "prefixItems": [
        {"type": "number"}, {"type": "number"}], "items": False, "minItems": 2}}),
    _tool("run", run={"enum": ["start", "stop"]}, env={"type": "object", "additionalProperties": {"type": "string"}}),
    _tool("id", id={"type": "string", "format": "uuid"}, note={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {}, "additionalProperties": False},
]  # fmt: skip


def schema_cases(num: int, seed: int = 0) -> list[Schema]:
    """Return num different schemas, the same for the same seed."""
    rng = random.Random(seed)
    cases: list[Schema] = [*SUITE, *TOOLS]
    while len(cases) < num:
        if (schema := _drawn(rng, 3)) not in cases:
            cases.append(schema)
    return cases[:num]


def _drawn(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_text, _number, _choice]
    if depth:
        kinds += [_object, _object, _object, _array, _array, _union]
    return rng.choice(kinds)(rng, depth)


def _text(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(5)
    bounds = {"minLength": least, "maxLength": least + rng.randrange(12)}
    pattern = rng.choice(["^[a-z]+$", "^\\w{1,8}$", "^(yes|no|\u00e9t\u00e9)$", "^\\d{4}-\\d{2}$", "[0-9]"])
    form = rng.choice(["date", "time", "ipv4", "uuid"])
    return {"type": "string", **rng.choice([{}, bounds, {"pattern": pattern}, {"format": form}])}


def _number(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(-100, 100)
    bounds = {"minimum": least, "maximum": least + rng.randrange(1, 10 ** rng.randrange(1, 9))}
    kind = rng.choice(["integer", "number"])
    return {"type": kind, **rng.choice([{}, bounds, {"exclusiveMinimum": least}, {"maximum": least}])}


def _choice(rng: random.Random, depth: int) -> Schema:
    values = ["on", "off", "", '"', 0, -1.5, True, None, [1, "x"], {"k": []}]
    schemas: list[Schema] = [{"enum": rng.sample(values, rng.randrange(1, 6))}, {"type": "boolean"}, {"const": '"'}]
    return rng.choice(schemas)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "tags", "size", "a b", "\u00fc", "is_on", "at", "x1"], rng.randrange(1, 6))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _drawn(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
    }
    return {**schema, **rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "null"}}])}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(3)
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + rng.randrange(1, 4)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_drawn(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    return {**schema, "items": _drawn(rng, depth - 1)}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_drawn(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}
