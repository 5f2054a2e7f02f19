"""A run of one of other projects' agents against a server; what it did as JSON on stdout.

Started by tests/processes/test_agents.py in the environment of `make clients`. Reads JSON of
{agent, url, steps, chromium}. The agents are as published, with their own prompts and tools; what
the model asks for does no harm: the coding agent's commands are not run, and the browser's names
resolve to nothing but the page that is served here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODEL = "tiny-vlm"
BOUND_TOKENS = 1500
"""Within them the model, not trained for it, ends most bound answers."""
PAGE = b"<title>Shapes</title><h1>Shapes</h1><button>red circle</button><a href=/next>next</a>"


class RunsNothing:
    """The coding agent's environment; its commands are kept and get one answer."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def execute(self, action: dict[str, str], cwd: str = "", **_: Any) -> dict[str, Any]:
        self.commands.append(action["command"])
        return {"output": "README.md\n", "returncode": 0, "exception_info": ""}

    def get_template_vars(self, **_: Any) -> dict[str, str]:
        return dict.fromkeys(("system", "release", "version", "machine", "cwd"), "none")

    def serialize(self) -> dict[str, Any]:
        return {}


def with_mini_swe_agent(task: dict[str, Any]) -> dict[str, Any]:
    """Its own configuration: a tool for commands, calls and their results in one long history."""
    import minisweagent
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel

    text = Path(minisweagent.__file__).with_name("config").joinpath("mini.yaml").read_text()
    config = yaml.safe_load(text)
    templates = {name: config["model"][name] for name in config["model"] if "template" in name}
    model = LitellmModel(
        model_name=f"openai/{MODEL}", cost_tracking="ignore_errors", **templates,
        model_kwargs={
            "api_base": task["url"] + "/v1", "api_key": "none", "tool_choice": "required",
            "temperature": 0, "max_tokens": BOUND_TOKENS,
        },
    )  # fmt: skip
    environment = RunsNothing()
    agent = DefaultAgent(
        model, environment, step_limit=task["steps"], cost_limit=0,
        **{name: config["agent"][name] for name in ("system_template", "instance_template")},
    )  # fmt: skip
    ended = agent.run("say what is in this folder")
    calls = [message for message in agent.messages if message.get("tool_calls")]
    return {
        "status": ended["exit_status"], "requests": agent.n_calls,
        "called": sum(len(message["tool_calls"]) for message in calls),
        "commands": environment.commands,
    }  # fmt: skip


class Served(BaseHTTPRequestHandler):
    """The page to look at, under every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: Any) -> None:
        """Nothing is written down."""


def with_browser_use(task: dict[str, Any]) -> dict[str, Any]:
    """A real Chromium that it drives: each step sends a screenshot and a strict schema of actions,
    and what the model answers is done."""
    from browser_use import Agent, Browser, ChatOpenAI

    site = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{site.server_port}/"
    agent = Agent(
        task="Press the red circle.", use_vision=True, flash_mode=True, use_judge=False,
        llm=ChatOpenAI(
            model=MODEL, base_url=task["url"] + "/v1", api_key="none", temperature=1.0, seed=1,
            frequency_penalty=None, max_completion_tokens=BOUND_TOKENS, max_retries=0,
        ),
        browser=Browser(
            headless=True, executable_path=task["chromium"], chromium_sandbox=False,
            allowed_domains=["127.0.0.1"], enable_default_extensions=False,
            args=["--no-proxy-server", "--disable-background-networking",
                  "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"],
        ),
        initial_actions=[{"navigate": {"url": home, "new_tab": False}}],
        enable_signal_handler=False, llm_timeout=300, step_timeout=400,
    )  # fmt: skip
    history = asyncio.run(agent.run(max_steps=task["steps"]))
    asked = [step for step in history.history if step.model_output]
    return {
        "requests": history.number_of_steps() - 1,  # the first went to the page without asking
        "acted": sum(len(step.model_output.action) for step in asked[1:]),
        "screenshots": sum(bool(step.state.screenshot_path) for step in asked[1:]),
    }


AGENTS = {"mini-swe-agent": with_mini_swe_agent, "browser-use": with_browser_use}

if __name__ == "__main__":
    given = json.loads(sys.stdin.read())
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.environ.update(
            MSWEA_GLOBAL_CONFIG_DIR=folder, BROWSER_USE_CONFIG_DIR=folder, HOME=folder,
            MSWEA_SILENT_STARTUP="1", LITELLM_LOCAL_MODEL_COST_MAP="True",
            ANONYMIZED_TELEMETRY="false", BROWSER_USE_CLOUD_SYNC="false",
            BROWSER_USE_VERSION_CHECK="false", SKIP_LLM_API_KEY_VERIFICATION="true",
            TIMEOUT_BrowserStartEvent="200", TIMEOUT_BrowserLaunchEvent="200",
        )  # fmt: skip
        found = AGENTS[given["agent"]](given)
    print(json.dumps(found))
