"""Three actions of a person on a fresh machine, in an environment with an empty HOME.

    python -m e2e.fresh_environment ENVIRONMENT
    python -m e2e.fresh_environment --root WORK

ENVIRONMENT is a virtual environment in which `foveal` was installed (e2e/release.sh makes one).
With --root everything but the hub and the browser runs in a root directory of its own, as on a
Debian with only Python (e2e/fresh_root.sh says what WORK holds); there the first action is
`pip install foveal` from WORK/wheels into an environment that Debian's Python makes. A
hub on the loopback has the bundled model as org/tiny-vlm. `foveal serve org/tiny-vlm` downloads and
serves it, the page at / is opened in Chromium, and an image is asked about; then `foveal bench`
measures the same server, and Ctrl-C ends it. Exits with 1 at the first thing that is not as it must
be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from foveal_runtime.plan.local import free_port
from tests.support.model_hub import Hub

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "tiny-vlm" / "model"
IMAGE = ROOT / "examples" / "tiny-vlm" / "images" / "digit-7.png"
NAME = "org/tiny-vlm"
START_SECONDS = 600.0


class Machine:
    """`programs`: the environment's bin; `home`: empty at first. `enter`: begins every command;
    `inside`: HOME as the command sees it."""

    def __init__(
        self, programs: Path, home: Path, hub: Hub, enter: tuple[str, ...] = (), inside: str = ""
    ) -> None:
        self.programs, self.home, self.enter = programs, home, enter
        inside = inside or str(home)
        self.environment = {
            "PATH": f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin{os.pathsep}/usr/sbin",
            "HOME": inside, "TMPDIR": inside, "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip

    def command(self, *words: str) -> list[str]:
        """One of the environment's programs."""
        return [*self.enter, str(self.programs / words[0]), *words[1:]]

    def run(self, *words: str) -> str:
        """The standard output of a program that must end well."""
        done = subprocess.run(
            [*self.enter, *words], env=self.environment, cwd=self.home, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    @contextlib.contextmanager
    def running(self, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        """Ends with the block by Ctrl-C; its output is shown when something went wrong."""
        log = self.home / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(*command), cwd=self.home, env=self.environment, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
            process.send_signal(signal.SIGINT)
            process.wait(120)
        except BaseException:
            print(log.read_text(errors="replace")[-4000:])
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what is left of what was started here
            process.wait()


def answer(process: subprocess.Popen[bytes], url: str, model: str) -> float:
    """Seconds until the server gave its first answer."""
    begin = time.perf_counter()
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    while time.perf_counter() - begin < START_SECONDS:
        assert process.poll() is None, "the server ended at start"
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(request, timeout=60) as got,
        ):
            if json.load(got)["choices"]:
                return time.perf_counter() - begin
        time.sleep(0.1)
    raise SystemExit(f"no answer at {url} after {START_SECONDS:.0f} s")


def ask_on_the_page(url: str) -> str:
    """What the page answers about an image. "" where no browser is installed."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), "")
    if not program:
        return ""
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(url)
        page.set_input_files("#files", IMAGE)
        page.fill("#text", "which digit is this?")
        page.press("#text", "Enter")
        whole = page.locator("article.assistant").first
        expect(whole.locator("dl")).to_be_visible(timeout=120_000)
        text = whole.locator("p").first.inner_text()
        browser.close()
    return text


def three_actions(machine: Machine) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with machine.running("foveal", "serve", NAME, "--port", str(port)) as process:
        seconds = answer(process, url, NAME)
        print(
            f"foveal serve {NAME}: first answer after {seconds:.1f} s, download and plan included"
        )
        said = ask_on_the_page(url)
        print(
            f"the page answered: {said!r}" if said else "no Chromium here: the page was not asked"
        )
        assert said in ("", "7"), "the page's answer is wrong"
        words = ("bench", url, "--traces", "hits-30", "--requests", "4")
        said = machine.run(*machine.command("foveal", *words)[len(machine.enter) :])
        assert "Every request was answered." in said
    assert process.returncode == 0, f"Ctrl-C gave exit code {process.returncode}"


def install(machine: Machine) -> None:
    """`foveal` by pip, into an environment that the system's Python makes."""
    environment = str(machine.programs.parent)
    machine.run("/usr/bin/python3", "-m", "venv", environment)
    version = machine.run(
        "/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"
    )
    packages = machine.home / f"environment/lib/python{version.strip()}/site-packages"
    (packages / "packages.pth").write_text("/packages\n")
    # Debian's environments begin with one that is too old for torch; /packages has a newer one.
    machine.run(f"{environment}/bin/pip", "uninstall", "--quiet", "--yes", "setuptools")
    begin = time.perf_counter()
    said = machine.run(
        f"{environment}/bin/pip", "install", "--no-index", "--find-links", "/wheels", "foveal"
    )
    print(f"pip install foveal: {time.perf_counter() - begin:.1f} s, {said.splitlines()[-1]}")
    assert "Successfully installed foveal-" in said
    seen = machine.run("/usr/bin/find", "/", "-maxdepth", "1", "-printf", "%f ")
    print(f"the root directory: {' '.join(sorted(seen.split()))}")
    assert not machine.run("/usr/bin/find", "/home", "/tmp", "/usr/local", "-mindepth", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path, nargs="?")
    parser.add_argument("--root", type=Path, metavar="WORK", help="in a root directory of its own")
    arguments = parser.parse_args()
    if (arguments.environment is None) == (arguments.root is None):
        parser.error("give ENVIRONMENT or --root WORK")
    with Hub(NAME, MODEL).running() as hub:
        if arguments.root is not None:
            work = arguments.root.resolve()
            home = work / "root"
            if home.exists():
                raise SystemExit(f"{home} is there already: remove {work} or give another folder")
            home.mkdir()
            enter = (str(ROOT / "e2e/fresh_root.sh"), str(work))
            machine = Machine(Path("/root/environment/bin"), home, hub, enter, "/root")
            install(machine)
            three_actions(machine)
            return
        with tempfile.TemporaryDirectory(prefix="foveal-fresh-") as home_folder:
            programs = arguments.environment.resolve() / "bin"
            three_actions(Machine(programs, Path(home_folder), hub))


if __name__ == "__main__":
    main()
