"""A stand-in for the Hugging Face hub, as far as repositories of models go: made, written to, and read.

`python tests/fake_hub.py 8900` serves one until it is ended; `HF_ENDPOINT=http://127.0.0.1:8900` asks it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


OWNER = "me"


class FakeHub(ThreadingHTTPServer):
    """Listens on a port of this machine; keeps the files of each repository as bytes by name."""

    daemon_threads = True

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.refused: tuple[str, ...] = ()  # what paths of requests that fail hold
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_) -> None:
        pass

    def answer(self, content: object, code: int = 200, **headers: object) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if any(part in self.path for part in self.server.refused) or "Authorization" not in self.headers:
            return self.answer({"error": "the hub is having a bad day"}, 403)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            owner, name = asked.get("organization") or OWNER, asked["name"]
            if owner != OWNER:
                return self.answer({"error": f"{OWNER} may not write to {owner}"}, 403)
            self.server.repositories.setdefault(f"{owner}/{name}", {})
            return self.answer({"url": f"{self.server.url}/{owner}/{name}", "id": f"{owner}/{name}"})
        if self.path == "/api/validate-yaml":
            wrong = re.search(r"^base_model: *\S*/\S*/.*$", json.loads(body)["content"], re.MULTILINE)
            return self.answer({"errors": [{"message": wrong and wrong[0]}]}, 400 if wrong else 200)
        if "/preupload/" in self.path:  # all files come within the commit
            named = [file["path"] for file in json.loads(body)["files"]]
            return self.answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in named]})
        repository = re.fullmatch(r"/api/models/(.+)/commit/main", self.path.partition("?")[0])[1]
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.repositories[repository][line["value"]["path"]] = base64.b64decode(
                    line["value"]["content"]
                )
        return self.answer({"commitUrl": f"{self.server.url}/{repository}/commit/{'0' * 40}", "commitOid": "0" * 40})

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/main)?", path)
        files = self.server.repositories.get((found or info or [None, None])[1])
        if found and files and found[2] in files:
            tag = hashlib.sha1(files[found[2]]).hexdigest()
            return self.answer(files[found[2]], X_Repo_Commit="0" * 40, ETag=f'"{tag}"')
        if info and files is not None:
            return self.answer({"id": info[1], "sha": "0" * 40, "siblings": [{"rfilename": name} for name in files]})
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path)
        if tree and tree[1] in self.server.repositories:
            files = self.server.repositories[tree[1]]
            found = [{"type": "file", "path": name, "size": len(files[name]), "oid": name} for name in files]
            return self.answer(found)
        return self.answer({"error": "not found"}, 404, X_Error_Code="RepoNotFound" if info else "EntryNotFound")

    do_HEAD = do_GET


if __name__ == "__main__":
    FakeHub(int(sys.argv[1])).serve_forever()
