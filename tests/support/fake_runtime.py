"""Stands for foveal-runtime in tests of `foveal up`: answers /readyz and /metrics, no model.

Run as `fake_runtime.py engine|frontend --config FILE`. FOVEAL_FAKE_<ROLE> changes what it does:
"refuse" ends with 2 and a reason, "die" ends with 7 at the first /readyz, "never" is never ready,
"stay" ignores SIGTERM. Each end is written beside the document, in order.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

role, path = sys.argv[1], Path(sys.argv[3])
document = json.loads(path.read_text())
mode = os.environ.get(f"FOVEAL_FAKE_{role.upper()}", "")
name = document["engine_id" if role == "engine" else "frontend_id"]
is_engine = role == "engine"
METRICS = {
    "engine": 'vllm:num_requests_running 1\nfoveal_kv_blocks{state="active"} 1\n'
    'foveal_kv_blocks{state="free"} 3\n',
    "frontend": "foveal_engines_ready 1\n"
    'foveal_cache_bytes{cache="processor",tier="host"} 1024\n'
    'foveal_cache_capacity_bytes{cache="processor",tier="host"} 4096\n',
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/readyz" and mode == "die":
            print("ValueError: tensors do not match", flush=True)
            os._exit(7)
        ready = self.path != "/readyz" or mode != "never"
        body = METRICS[role].encode() if self.path.startswith("/metrics") else b"ok"
        self.send_response(200 if ready else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def end(*_):
    if mode == "stay":
        return
    with (path.parent / "ends.txt").open("a") as file:
        file.write(f"{name}\n")
    threading.Thread(target=server.shutdown).start()


if mode == "refuse":
    print("foveal-runtime: model.max_model_len 9 is too small; raise it", flush=True)
    sys.exit(2)
host = document["http_host" if is_engine else "host"]
port = document["http_port" if is_engine else "port"]
server = ThreadingHTTPServer((host, port), Handler)
signal.signal(signal.SIGTERM, end)
(path.parent / f"{name}.devices").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
(path.parent / f"{name}.pid").write_text(str(os.getpid()))
(path.parent / f"{name}.began").write_text(str(time.monotonic()))
server.serve_forever()
