"""A Compose deployment of its own name and port, and what was done with it as a transcript."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
PROJECT = "baton-test"
NETWORK = f"{PROJECT}_default"
BATON = Path(sys.executable).with_name("baton")
READ_METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
CRASH = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*"):
    if b"decode_svc" in (path / "cmdline").read_bytes().split(bytes(1)) and path.name != "1":
        os.kill(int(path.name), signal.SIGKILL)
"""


class Deployment:
    """Commands on a deployment from `files`, which are recorded in `transcript` as a user would type them."""

    def __init__(self, files: Sequence[str], environment: dict[str, str], transcript: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
            self.port, self.http_port = free.getsockname()[1], other.getsockname()[1]
        self.transcript = transcript
        self._files = [part for file in files for part in ("-f", file)]
        self._environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": PROJECT,
            "BATON_PORT": str(self.port),
            "BATON_HTTP_PORT": str(self.http_port),
            **environment,
        }

    @property
    def target(self) -> str:
        """The published address of the router."""
        return f"127.0.0.1:{self.port}"

    def compose(self, *arguments: str, show: bool = True, output: bool = False) -> str:
        """Output of `docker compose`, recorded if `output` is set; it is progress otherwise."""
        return self._run(["docker", "compose", *self._files, *arguments], show=show, output=output)

    def docker(self, *arguments: str, show: bool = False) -> str:
        return self._run(["docker", *arguments], show=show)

    def baton(self, *arguments: str) -> str:
        return self._run(["baton", *arguments], show=True, program=str(BATON))

    def note(self, text: str) -> None:
        """Record a line about what was observed."""
        self.transcript.append(f"# {text}\n".replace(PROJECT, "baton"))

    def _run(self, command: list[str], *, show: bool, output: bool = True, program: str = "") -> str:
        done = subprocess.run(
            [program or command[0], *command[1:]],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if show else subprocess.PIPE,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"{command} ended with status {done.returncode}:\n{done.stdout}{done.stderr or ''}"
        if show:
            text = " ".join(each if re.fullmatch(r"[\w./:=@,-]+", each) else f"'{each}'" for each in command)
            # Columns of a table stay where they are.
            result = re.sub(rf"{PROJECT}(\S*)(?=  )", rf"baton\1{' ' * 5}", done.stdout) if output else ""
            lines = f"$ {text}\n{result}".replace(PROJECT, "baton").replace(str(self.port), "50050")
            self.transcript.append(lines.rstrip() + "\n")
        return done.stdout

    def containers(self, service: str = "") -> list[str]:
        """Names of the containers of a service, or of all."""
        rows = self.docker(
            *("ps", "--all", "--format", "{{.Names}}", "--filter", f"label=com.docker.compose.project={PROJECT}"),
            *(("--filter", f"label=com.docker.compose.service={service}") if service else ()),
        )
        return sorted(rows.split())

    def inspect(self, name: str) -> Any:
        return json.loads(self.docker("inspect", name))[0]

    def healthy(self, name: str) -> bool:
        state = self.inspect(name)["State"]
        return bool(state["Running"] and state.get("Health", {}).get("Status") == "healthy")

    def crash(self, name: str) -> None:
        """Kill the decode service in a container. `docker kill` would count as a wish to stop it: no restart."""
        command = ["docker", "exec", name, "python3", "-c", CRASH]
        # The command may end with the container.
        subprocess.run(command, env=self._environment, capture_output=True, check=False, timeout=60)

    def metrics(self, name: str) -> dict[str, float]:
        """Values of all metrics of a container by name, summed over their labels."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.docker("exec", name, "python3", "-c", READ_METRICS)):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def replays(self) -> float:
        (router,) = self.containers("router")
        return self.metrics(router).get("baton_replays_total", 0.0)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> float:
    """Wait for the condition; the seconds that it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(0.5)
    return time.monotonic() - begin


def has_image(name: str) -> bool:
    """Whether the image is here; tests pull nothing."""
    return subprocess.run(["docker", "image", "inspect", name], capture_output=True).returncode == 0


def secrets(folder: Path) -> tuple[dict[str, str], str]:
    """Files of the secure variant, readable for the containers' user; its variables, and an API key."""
    subprocess.run([BATON, "certs", "--out", folder], check=True, capture_output=True)
    command = [BATON, "key", "new", "--file", folder / "api_keys.json", "--tenant", "me"]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    for file in folder.iterdir():
        shutil.chown(file, 10001) if os.getuid() == 0 else file.chmod(0o644)
    return {"BATON_SECRETS": str(folder), "BATON_FLEET_SECRET": os.urandom(32).hex()}, made.stdout.split()[-1]
