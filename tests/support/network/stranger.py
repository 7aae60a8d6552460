"""Connects to the ports of a Ray cluster from a separate process: `python stranger.py TOKEN ADDRESS...`, TOKEN may be
empty.

Prints a JSON object: for each address the server's responses to Ray's internal calls, and to an HTTP request.
"""

import json
import sys
import urllib.error
import urllib.request
from http.client import HTTPException

import grpc

CALLS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.ReporterService/HealthCheck",
)
SECONDS = 20


def knock(address: str, token: str) -> list[str]:
    """The distinct responses to empty calls, or to a GET if the server does not use gRPC."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    answers = set()
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        for call in CALLS:
            try:
                channel.unary_unary(call)(b"", metadata=tuple(headers.items()), timeout=SECONDS)
                answers.add("OK")
            except grpc.RpcError as error:
                answers.add(error.code().name)
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    return [get(address, headers)]
    return sorted(answers)


def get(address: str, headers: dict[str, str]) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(f"http://{address}/", headers=headers), timeout=SECONDS) as found:
            return found.read(1000).decode()
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, HTTPException):
        return ""


if __name__ == "__main__":
    print(json.dumps({address: knock(address, sys.argv[1]) for address in sys.argv[2:]}))
