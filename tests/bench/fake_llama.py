"""A program that speaks like llama-server and knows no model: `peers` tests start it.

The environment variable FAKE_LLAMA is a folder. `tokens.json` in it is what /tokenize answers. The
program writes its process id and arguments there, and every request. What it does wrong is said
by files: `dies`, `deaf` (never ready), `fails` (an error at the third request of a speculative
server), `hangs` (no answer at the third request), `old` (no token ids).
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

HELP = """\
--model, -m FNAME         the model
--ctx-size, -c N          size of the context
--cache-ram N             host memory for prompts
--spec-type none,draft-simple,ngram-simple,ngram-mod
                          types of speculative decoding
--model-draft, -md FNAME  draft model
--spec-draft-n-max N      tokens to draft
--spec-draft-p-min P      least probability
--draft-max N             the argument has been removed
--spec-ngram-simple-size-n N
--spec-ngram-simple-size-m N
"""


class Handler(BaseHTTPRequestHandler):
    """Answers; greedy text is a function of the prompt, and one token of a draft's differs."""

    folder = Path(os.environ.get("FAKE_LLAMA", "."))
    speculative = any(word in sys.argv for word in ("--spec-type", "--model-draft"))
    count = 0

    def do_GET(self) -> None:
        """/health."""
        if (self.folder / "deaf").exists():
            self._send({"error": "loading"}, 503)
        else:
            self._send({"status": "ok"})

    def do_POST(self) -> None:
        """/tokenize and /completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._send({"tokens": json.loads((self.folder / "tokens.json").read_text())})
            return
        Handler.count += 1
        if Handler.count == 3:
            if (self.folder / "hangs").exists():
                (self.folder / "hanging").touch()
                time.sleep(600)
            if self.speculative and (self.folder / "fails").exists():
                self._send({"error": "no memory left"}, 500)
                return
        with (self.folder / f"{os.getpid()}.requests").open("a") as log:
            log.write(json.dumps(body) + "\n")
        self._send(self._completion(body))

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        first, length = sum(body["prompt"]), body["n_predict"]
        tokens = [(first + i) % 50 for i in range(length)]
        times: dict[str, Any] = {"prompt_ms": 0.1, "predicted_ms": 0.5}
        if self.speculative:
            times |= {"draft_n": 10, "draft_n_accepted": 4}
        if "--model-draft" in sys.argv:
            tokens[-1] += 1
        old = (self.folder / "old").exists()
        return {"content": "...", "tokens": [] if old else tokens, "timings": times}

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def main() -> None:
    """Serves until it is ended."""
    if "--help" in sys.argv:
        print(HELP)
        return
    if "--version" in sys.argv:
        print("version: 42 (fake)", file=sys.stderr)
        return
    folder = Handler.folder
    (folder / f"{os.getpid()}.started").write_text(json.dumps(sys.argv[1:]))
    (folder / "policy").write_text(os.environ.get("OMP_WAIT_POLICY", ""))
    if (folder / "dies").exists():
        print("cannot read the model", file=sys.stderr)
        sys.exit(1)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
