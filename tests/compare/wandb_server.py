"""Stub of a W&B server for reading runs and saving a report, over HTTP."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LAST_PAGE = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}


class WandbServer(ThreadingHTTPServer):
    """Answers GraphQL queries about `runs` and records queries and saved reports."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: list[dict[str, Any]] = []
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.filters: list[dict[str, Any]] = []
        self.saved: list[dict[str, Any]] = []
        self.knows_account = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, config: dict[str, Any], rows: list[dict[str, Any]], **attributes: Any) -> None:
        self.history[name] = [{**row, "_step": place} for place, row in enumerate(rows)]
        self.runs.append(
            {
                "projectId": "1",
                "id": name,
                "name": name,
                "displayName": name,
                "tags": [],
                "sweepName": None,
                "state": "finished",
                "config": json.dumps({key: {"value": value} for key, value in config.items()}),
                "group": "abl",
                "jobType": "train",
                "commit": None,
                "readOnly": False,
                "createdAt": "2026-01-01T00:00:00Z",
                "heartbeatAt": "2026-01-01T00:00:00Z",
                "description": "",
                "notes": "",
                "systemMetrics": "{}",
                "summaryMetrics": json.dumps({"_wandb": {"runtime": 90}}),
                "historyLineCount": len(rows),
                "historyKeys": {"lastStep": len(rows) - 1, "keys": {}},
                "user": {"name": "me", "username": "me"},
                **attributes,
            }
        )

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0911
        if "viewer" in query:
            account = {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": account if self.knows_account else None}
        if "models(" in query:
            node = {"__typename": "Project", "id": "1", "name": "proj", "entityName": "me", "isBenchmark": False}
            node |= {"createdAt": "2026-01-01T00:00:00Z", "user": None}
            return {"models": {"edges": [{"node": node, "cursor": "1"}], "pageInfo": LAST_PAGE}}
        if "upsertView" in query:
            self.saved.append(variables)
            view = {"id": "view1", "type": "runs", "name": "n", "displayName": "t", "description": "", "spec": "{}"}
            return {"upsertView": {"view": {**view, "project": {"id": "1", "name": "proj", "entityName": "me"}}}}
        if variables.get("project", variables.get("projectName")) != "proj":
            return {"project": None}
        if "runs(" in query:
            self.filters.append(json.loads(variables["filters"]))
            edges = [{"node": run, "cursor": run["name"]} for run in self.runs]
            page = {"edges": edges, "pageInfo": LAST_PAGE}
            return {"project": {"internalId": "1", "runCount": len(edges), "readOnly": False, "runs": page}}
        if "run(" in query:
            return {"project": {"run": self._of_run(query, variables)}}
        return {"project": {"id": "1", "internalId": "1"}}

    def _of_run(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("name") or variables.get("runName") or variables["run"]
        rows = self.history[name]
        if "parquetHistory" in query:
            return {"parquetHistory": {"parquetUrls": [], "liveData": rows}}
        if "historyKeys" in query:
            return {"historyKeys": {"lastStep": len(rows) - 1, "keys": {}}}
        first, last = variables.get("minStep", 0), variables.get("maxStep", len(rows))
        return {"history": [json.dumps(row) for row in rows[first:last]]}


@contextmanager
def serving() -> Iterator[WandbServer]:
    server = WandbServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            answer = {"data": self.server.answer(asked["query"], asked.get("variables") or {})}
        self._say(answer)

    def do_GET(self) -> None:
        self._say({})

    def _say(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
