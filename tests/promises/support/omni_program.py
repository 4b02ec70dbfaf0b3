"""The proxy and one real omni replica as processes, which are started once for many tests."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omni_proxy.replica.model_file import MODELS, cache_folder
from omni_proxy.shared.watchdog import STALL_EVENT
from tests.program_forkserver import forking_interpreter

MODEL = "smollm2-135m"
NEEDED = ("torch", "hibari", "tiktoken")
READY_SECS = 90
CONFIG = """\
[server]
port = 0
state_file = "off"
[health]
interval_secs = 0.5
success_threshold = 1
on_threshold = "unhealthy"
[[launch]]
name = "omni"
command = [{command}]
base_port = {base_port}
model = "{model}"
capabilities = ["chat", "speech", "streaming", "audio_input", "audio_output"]
"""


def missing() -> str:
    """Returns why the real models can't run here, or "" if they can."""
    for module in NEEDED:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'omni-proxy[replica]'"
    folder = cache_folder(os.environ)
    for name in (MODEL, "whisper-tiny"):
        if not (folder / MODELS[name].file).exists():
            return f"{name} is missing: omni-proxy replica fetch {name}"
    return ""


@contextmanager
def omni(folder: Path, base_port: int) -> Iterator[str]:
    """Yields the base URL once the replica is routable."""
    python = forking_interpreter()
    replica_command = [
        python,
        "-m",
        "omni_proxy",
        "replica",
        "--host",
        "{host}",
        "--port",
        "{port}",
    ]
    replica_command += ["--model", MODEL, "--speech", "hibari", "--transcription", "whisper-tiny"]
    file = folder / "omni.toml"
    command = ", ".join(json.dumps(word) for word in replica_command)
    file.write_text(CONFIG.format(command=command, base_port=base_port, model=MODEL))
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [python, "-m", "omni_proxy", "--config", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _until_ready(process, log)
    finally:
        process.terminate()
        assert process.wait(30) == 0
        assert STALL_EVENT not in log.read_text(), log.read_text()


def _until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + READY_SECS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        match = re.search(r"listener_opened url=(http://\S+)", log.read_text())
        if match:
            with urllib.request.urlopen(f"{match[1]}/workers", timeout=5) as answer:
                if json.load(answer)["routable_workers"] == 1:
                    return match[1]
        _pause()
    raise AssertionError(log.read_text())


def _pause() -> None:
    # The state of another process can only be polled.
    time.sleep(0.1)  # noqa: TID251  no event loop runs here
