"""Read the fields about tools and the answer's format, checked, into what an `Ask` has."""

import json
import re
from dataclasses import replace
from typing import Any

from csattn.checks import lone_surrogate
from workers.api.fields import Fields, shown_value
from workers.serving.messages import Tool, ToolCall

MAX_TOOLS = 512  # several MCP servers exceed OpenAI's limit of 128
MAX_CALLS = 128  # of a turn
MAX_NAME_CHARS = 128  # Anthropic's limit; OpenAI's is 64
NAME = re.compile(r"[A-Za-z0-9_-]+")
MAX_CHARS = 1 << 20  # of descriptions and of a call's arguments; the body itself has a limit
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def read_tools(fields: Fields, is_nested: bool = True) -> dict[str, Any]:
    """Read `tools`, `tool_choice` and `parallel_tool_calls` into an Ask's fields. is_nested: `function` is an object of
    its own, as in chats."""
    tools = _tools(fields, is_nested)
    if len(tools) > MAX_TOOLS:
        fields.refuse("tools", f"have {len(tools)} functions, wanted at most {MAX_TOOLS}")
    names = names_of(tools, fields)
    choice = _choice(fields, names, is_nested)
    is_parallel = fields.flag("parallel_tool_calls", default=True)
    return {
        "tools": () if choice == "none" else tools,
        "must_call": tuple(names) if choice == "required" else () if isinstance(choice, str) else tuple(choice),
        "parallel_calls": is_parallel and not isinstance(choice, list),  # a named function is called once
    }


def names_of(tools: tuple[Tool, ...], fields: Fields) -> list[str]:
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        fields.refuse("tools", "repeat a name; give each tool a name of its own")
    return names


def read_format(fields: Fields, name: str, has_wrapper: bool = True) -> dict[str, Any]:
    """Read `response_format` into an Ask's fields. has_wrapper: the schema is inside `json_schema`, as in chats."""
    form = fields.inner(name)
    if form is None:
        return {}
    kind = form.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        form.refuse("type", "is missing, wanted one of text, json_object, json_schema")
    schema: Any = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        inner = form.inner("json_schema") if has_wrapper else form
        if inner is None:
            form.refuse("json_schema", "is missing, wanted an object with name and schema")
        schema = inner.any_of("schema")
        if not isinstance(schema, dict | bool):
            inner.refuse("schema", "is missing or no schema, wanted an object")
        inner.require_text_within("schema", schema)
        inner.ignore("name", "description", "strict")  # the schema is always enforced
        inner.finish()
    form.finish()
    return {"schema": schema}


def read_calls(fields: Fields) -> tuple[ToolCall, ...]:
    """Read `tool_calls` in an assistant's message."""
    calls = []
    for index, item in enumerate(fields.listed("tool_calls", MAX_CALLS)):
        call = Fields(item, f"{fields.where}tool_calls[{index}].")
        call.only("type", "function", why="only functions are called here")
        call.ignore("index")
        function = call.inner("function")
        if function is None:
            call.refuse("function", "is missing, wanted an object with name and arguments")
        calls.append(read_call(function, call.needed_text("id", 256)))
        call.finish()
    return tuple(calls)


def read_call(fields: Fields, call_id: str) -> ToolCall:
    """Read a call's name and arguments, its only fields."""
    name, written = checked_name(fields), fields.text("arguments", MAX_CHARS) or "{}"
    fields.finish()
    try:
        arguments = json.loads(written)
        if lone_surrogate(json.dumps(arguments, ensure_ascii=False)) is not None:  # a template cannot write it
            arguments = None
    except (ValueError, RecursionError):
        arguments = None
    # text, if max_tokens cut the call off or it has half a character: clients send it back with all later turns
    return ToolCall(call_id, name, arguments if isinstance(arguments, dict) else written)


def checked_name(fields: Fields) -> str:
    name = fields.needed_text("name", MAX_NAME_CHARS)
    if NAME.fullmatch(name) is None:
        fields.refuse("name", "has characters other than letters, digits, underscores and dashes")
    return name


def _tools(fields: Fields, is_nested: bool, namespace: str = "") -> tuple[Tool, ...]:
    """Read `tools`. In Responses, they may be in namespaces. A search of the web beside other tools, which agents offer
    to every server, is not offered to the model; alone, it is what the client wants, and refused."""
    tools: list[Tool] = []
    items = fields.listed("tools", MAX_TOOLS)
    has_kinds = not (is_nested or namespace)
    searches_only = all(isinstance(item, dict) and item.get("type") == "web_search" for item in items)
    for index, item in enumerate(items):
        outer = Fields(item, f"{fields.where}tools[{index}].")
        kind = outer.any_of("type")
        if has_kinds and kind == "web_search" and not searches_only:
            continue
        if has_kinds and kind == "namespace":
            name = checked_name(outer)
            outer.text("description", MAX_CHARS)  # each function has one of its own
            tools += _tools(outer, is_nested, name)
            outer.finish()
        else:
            tool = _tool(outer, kind, is_nested)
            tools.append(replace(tool, name=name_within(namespace, tool.name)))
    return tuple(tools)


def name_within(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a function of a namespace, if it is in one."""
    return f"{namespace}__{name}" if namespace else name


def _tool(outer: Fields, kind: object, is_nested: bool) -> Tool:
    if kind != "function":
        outer.refuse("type", f'is {shown_value(kind)}, wanted "function": the service runs no tools of its own')
    outer.ignore("cache_control")
    fields = outer.inner("function") if is_nested else outer
    if fields is None:
        outer.refuse("function", "is missing, wanted an object with name and parameters")
    tool = read_tool(fields, "parameters")
    fields.finish()
    outer.finish()
    return tool


def read_tool(fields: Fields, schema_field: str) -> Tool:
    """Read a tool's name, schema and description."""
    parameters = fields.any_of(schema_field)
    if parameters is not None and (not isinstance(parameters, dict) or parameters.get("type", "object") != "object"):
        fields.refuse(schema_field, 'is not a JSON schema of "type": "object"')
    if not isinstance((parameters or {}).get("properties", {}), dict):
        fields.refuse(schema_field, "has properties that are not an object")
    fields.require_text_within(schema_field, parameters)
    return Tool(
        checked_name(fields),
        {**(parameters or NO_PARAMETERS), "type": "object"},  # in the client's order, in which templates write it
        fields.text("description", MAX_CHARS),
        fields.flag("strict"),
    )


def _choice(fields: Fields, names: list[str], is_nested: bool) -> str | list[str]:
    """Read `tool_choice`: none, auto, required, or a list of the one named tool."""
    value = fields.any_of("tool_choice")
    if isinstance(value, dict):
        choice = Fields(value, "tool_choice.")
        if choice.any_of("type") != "function":
            choice.refuse("type", 'is not "function"; wanted none, auto, required, or one function by its name')
        function = choice.inner("function") if is_nested else choice
        name = function.needed_text("name", MAX_NAME_CHARS) if function is not None else None
        if function is not None:
            function.finish()
        choice.finish()
        if name not in names:
            fields.refuse("tool_choice", "names a function that is not among the tools")
        return [name]
    if value not in (None, "none", "auto", "required"):
        fields.refuse("tool_choice", "is not one of none, auto, required, or an object that names a function")
    if value == "required" and not names:
        fields.refuse("tool_choice", "is required, but there are no tools")
    return str(value or "auto")
