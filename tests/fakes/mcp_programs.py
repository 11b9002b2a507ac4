"""MCP servers as programs of one file, as a repository could hold them: a good one, and bad ones by name."""

GOOD = """
import json, sys

SCHEMA = {
    "type": "object",
    "properties": {
        "numbers": {"type": "array", "items": {"type": "number"}, "description": "what to add"},
        "unitName": {"type": "string"},
        "options": {"anyOf": [{"type": "object"}, {"type": "null"}], "default": None},
    },
    "required": ["numbers"],
}
LISTED = [
    [{"name": "add", "description": "Adds numbers.", "inputSchema": SCHEMA}],
    [{"name": name, "inputSchema": {"type": "object"}} for name in ("fail", "die", "huge", "hang", "bad name")],
]


def call(name, arguments):
    if name == "add":
        print("a server may print")
        say({"id": 77, "method": "roots/list"})  # of which the client has none
        told = f"{sum(arguments['numbers'])} {arguments.get('unitName', '')} {arguments.get('options')}"
        return {"content": [{"type": "text", "text": told}, {"type": "image", "data": "AAAA"}]}
    if name == "fail":
        return {"isError": True, "content": [{"type": "text", "text": "no such table"}]}
    if name == "die":
        sys.exit("out of beans")
    if name == "hang":
        import time
        time.sleep(60)
    return {"content": [{"type": "text", "text": "x" * 5_000_000}]}


def say(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


for line in sys.stdin:
    message = json.loads(line)
    method, parameters = message.get("method"), message.get("params") or {}
    if "id" not in message or method is None:
        continue
    if method == "initialize":
        result = {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "sums", "version": "1"}}
    elif method == "tools/list":
        page = int(parameters.get("cursor", 0))
        result = {"tools": LISTED[page], **({"nextCursor": "1"} if page == 0 else {})}
    else:
        result = call(parameters["name"], parameters["arguments"])
    say({"id": message["id"], "result": result})
"""

WITH_THE_PACKAGE = '''
from mcp.server.fastmcp import FastMCP

server = FastMCP("sums")


@server.tool()
def add(numbers: list[float], unit: str = "") -> str:
    """Adds numbers."""
    return f"{sum(numbers):g} {unit}".strip()


@server.tool()
def divide(one: float, other: float) -> float:
    """Divides."""
    return one / other


server.run()
'''
