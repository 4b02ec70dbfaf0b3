"""The commands of the pages about trainers and replicas, run as written against real ones.

Only ports, folders and the probe interval differ. Commands that cannot run here, or that another
test runs, are in ELSEWHERE; `Page.completed` proves that no other command is left out.
"""

import importlib.util
import json
import re
import shutil
import sys
from functools import partial

import httpx
import pytest
import trio

from tests.ports import free_port, free_run
from tests.program_forkserver import forking_interpreter
from tests.promises.support.omni_program import missing
from tests.promises.support.replica_program import until
from tests.promises.support.terminal import terminal
from tests.tree import ROOT

pytestmark = pytest.mark.skipif(
    shutil.which("curl") is None
    or not all(map(importlib.util.find_spec, ("torch", "tiktoken", "safetensors"))),
    reason="curl, or a package of the replica, is not installed",
)
ELSEWHERE = {
    "omni-proxy replica --model tiny --port 31000 --kv-events 'tcp://*:5557' --kv-replay 'tcp://*:5558'": "tests/promises/routing/test_kv_event_replica.py",
    "curl http://127.0.0.1:31000/kv_event_sources": "tests/promises/routing/test_kv_event_replica.py",
    # It would fetch a gigabyte; these tests run with the packages that it installs.
    "pip install '.[replica]'": "tests/test_docs.py",
    # It takes minutes, moves 538 MB and needs an idle machine: its parts are tested.
    "python -m tools.bench --weights": "tests/tools/test_bench_weights.py",
    "omni-proxy replica --model tiny --role prefill --kv-connector nixl --port 31000 "
    "--bootstrap-port 8998": "tests/promises/disaggregation/test_prefill_and_decode_replicas.py",
    "omni-proxy replica --model tiny --role decode --kv-connector nixl --port 31001": (
        "tests/promises/disaggregation/test_prefill_and_decode_replicas.py"
    ),
    "curl http://127.0.0.1:31000/v1/completions -H 'content-type: application/json' -d '"
    '{"prompt": "The sea", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}}'
    "'": "tests/promises/disaggregation/test_prefill_and_decode_replicas.py",
}
FAST_PROBES = "[health]\ninterval_secs = 0.3\nsuccess_threshold = 1\n"
DEADLINE_SECS = 240  # only ends a test that hangs


def fenced(page):
    """The fenced blocks of the page with their languages, "" for none."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def blocks(page, language):
    return [block for name, block in fenced(page) if name == language]


def commands(page):
    """The commands of the page in order: lines of shell blocks, and those typed in others."""
    lines_of_page = []
    for language, block in fenced(page):
        lines = block.replace("\\\n", " ").splitlines()
        if language == "sh":
            lines_of_page += lines
        elif not language:
            lines_of_page += [
                line.removeprefix("$ ") for line in lines if line.startswith(("curl ", "$ "))
            ]
    return [line for line in lines_of_page if line and line not in ELSEWHERE]


class Page:
    """Returns the commands of a page, in the page's order and each once."""

    def __init__(self, name):
        self._remaining = commands(name)

    def next(self, beginning):
        line = self._remaining.pop(0)
        assert line.startswith(beginning), line
        return line

    @property
    def completed(self):
        """Whether every command was returned."""
        return not self._remaining


async def _trace_files(folder):
    """The traces that the stages have written; each stage stops by itself."""
    return [file for file in folder.glob("trace*") if file.stat().st_size]


async def routable(url, count):
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:

        async def holds():
            body = (await client.get("/workers")).json()
            known = [row for row in body["workers"] if row["weight_version"]]
            return body["routable_workers"] == count == len(known)

        await until(holds)


async def healthy(url):
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:

        async def holds():
            return (await client.get("/health")).status_code == 200

        await until(holds)


async def test_the_commands_of_the_trainers_page_work(tmp_path):
    page, port, first = Page("docs/trainers.md"), free_port(), free_run(2)
    url = f"http://127.0.0.1:{port}"
    subcommands = ("pause", "continue", "checksum", "status", "resolve")
    replacements = {f"weights {name}": f"weights {name} --url {url}" for name in subcommands}
    replacements["http://127.0.0.1:30000"] = url
    (text,) = blocks("docs/trainers.md", "toml")
    text = text.replace("[server]\n", f"[server]\nport = {port}\n")
    text = text.replace("replicas = 2\n", f"replicas = 2\nbase_port = {first}\n")
    (tmp_path / "proxy.toml").write_text(FAST_PROBES + text)
    shown_sums, shown_status = (
        block for block in blocks("docs/trainers.md", "") if "WORKER" in block
    )
    with trio.fail_after(DEADLINE_SECS):
        async with terminal(tmp_path, replacements, forking_interpreter()) as typing:
            await typing.leave_running(page.next("omni-proxy --config"))
            await routable(url, 2)
            (tmp_path / "example.py").write_text(blocks("docs/trainers.md", "python")[0])
            python = f"PROXY={url} PYTHONPATH={ROOT} {sys.executable} example.py"
            versions, served_by = (await typing.type(python)).splitlines()
            workers = [f"http://127.0.0.1:{number}" for number in (first, first + 1)]
            assert versions == str(dict.fromkeys(workers, "step-1"))
            assert served_by == "step-1"
            for state in ("pause", "continue"):
                assert await typing.type(page.next(f"omni-proxy weights {state}"))
            for _ in ("a group by a prefix", "all"):
                shown = await typing.type(page.next("curl -X POST"))
                aborted = json.loads(shown[shown.index('{"') :])
                assert [result["worker"] for result in aborted["results"]] == workers
                assert aborted["success"]
            output = await typing.type(page.next("omni-proxy weights checksum"))
            assert output.splitlines()[0] == shown_sums.splitlines()[0]
            assert len({line.split()[-1] for line in output.splitlines()[2:]}) == 1
            output = await typing.type(page.next("omni-proxy weights status"))
            for number, worker in enumerate(workers):
                shown_status = shown_status.replace(f"http://127.0.0.1:3100{number}", worker)
            output, shown = (
                re.sub(r"\S+T\S+ |\d+\.\d s", "", text) for text in (output, shown_status)
            )
            assert output == shown
            assert await typing.type(page.next("omni-proxy weights resolve"))
    assert page.completed


async def test_the_commands_of_the_weight_sync_page_work(tmp_path):
    page, port, first = Page("docs/weight-sync.md"), free_port(), free_run(3)
    url = f"http://127.0.0.1:{port}"
    replacements = {
        "tools/trainer": f"{ROOT}/tools/trainer --endpoint {url}",
        "localhost:30000": f"127.0.0.1:{port}",
        "curl ": "curl --fail-with-body ",
        **{f"3100{number}": str(first + number) for number in range(3)},
    }
    (text,) = blocks("docs/weight-sync.md", "toml")
    text = text.partition("[[workers]]\n")[0]
    text = text.replace("[server]\n", f"[server]\nport = {port}\n")
    # The page's later commands need kept versions, and more than two rounds come before them.
    text = text.replace('mode = "coordinate"', 'mode = "both"\nkeep_versions = 9')
    workers = "".join(
        f'[[workers]]\nurl = "http://127.0.0.1:{first + number}"\n' for number in range(3)
    )
    (tmp_path / "proxy.toml").write_text(FAST_PROBES + text + workers)
    head = blocks("docs/weight-sync.md", "")[0].splitlines()[1]
    with trio.fail_after(DEADLINE_SECS):
        async with terminal(tmp_path, replacements, forking_interpreter()) as typing:
            for beginning in ("for port in", "omni-proxy replica --model tiny --tp 2"):
                await typing.leave_running(page.next(beginning))
            await typing.leave_running(page.next("omni-proxy --config"))
            await routable(url, 3)
            lines = (await typing.type(page.next("tools/trainer --rounds 4"))).splitlines()
            assert lines[1].split() == head.split()
            assert [line.split()[0] for line in lines[2:]] == list("01234")
            assert all(" 3 equal " in line for line in lines[2:])
            # From here on forked: each start of the script would import torch, which takes seconds.
            trainer = f"env PYTHONPATH={ROOT} {forking_interpreter()} -m tools.training"
            typing.places["tools/trainer"] = f"{trainer} --endpoint {url}"
            body = await typing.type(page.next("tools/trainer --rounds 1 --fault short"), status=1)
            assert "was announced with" in body
            assert "Nothing was changed" in body
            two = await typing.type(page.next("tools/trainer --rounds 1 --fault two-at-once"))
            assert "the second trainer got: 409 another trainer owns the weight sync" in two
            kept = json.loads(await typing.type(page.next("curl -s localhost:30000/weights/ver")))
            assert "step-3" in json.dumps(kept)
            body = json.loads(await typing.type(page.next("curl -s localhost:30000/weights/roll")))
            assert body["success"] is True
    assert page.completed


async def test_the_commands_of_the_replica_page_for_own_process_and_profiles_work(tmp_path):
    page, port = Page("docs/replica.md"), free_port()
    url = f"http://127.0.0.1:{port}"
    replacements = {
        "31000": str(port),
        "/tmp/": f"{tmp_path}/",
        "curl ": "curl -sS --fail-with-body ",
    }
    for _ in range(4):  # for a real model, tested below
        page.next(("omni-proxy replica --speech", "curl "))
    structured_request = page.next("curl ")
    with trio.fail_after(DEADLINE_SECS):
        async with terminal(tmp_path, replacements, forking_interpreter()) as typing:
            await typing.leave_running(page.next("omni-proxy replica --model tiny --own-process"))
            await healthy(url)
            choice = json.loads(await typing.type(structured_request))["choices"][0]
            assert choice["finish_reason"] == "length" or json.loads(choice["message"]["content"])
            assert json.loads(await typing.type(page.next("curl ")))
            async with httpx.AsyncClient(
                base_url=url, trust_env=False, timeout=60, verify=False
            ) as client:
                for _ in range(2):  # requests for the profile
                    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
                    answer = await client.post("/v1/chat/completions", json=body)
                    assert answer.status_code == 200
            assert json.loads(await typing.type(page.next("curl ")))
            output = await typing.type(page.next("omni-proxy replica profile"))
            (shown,) = (text for text in blocks("docs/replica.md", "") if "# Requests" in text)
            assert output.splitlines()[0] == shown.splitlines()[0]
            assert "scheduler_prefill_start->scheduler_prefill_end" in output
            for file in ("page.html", "report.json"):
                await typing.type(page.next("omni-proxy replica profile"))
                assert (tmp_path / file).stat().st_size > 500
            assert json.loads(await typing.type(page.next("curl ")))
            assert json.loads(await typing.type(page.next("curl ")))
            await until(partial(_trace_files, tmp_path / "demo"))
            assert (tmp_path / "demo" / "events").is_dir()
    assert page.completed


@pytest.mark.replica
@pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
async def test_the_documented_replica_serves_chat_speech_and_transcription(tmp_path):
    page, port = Page("docs/replica.md"), free_port()
    replacements = {"31000": str(port), "curl ": "curl -sS --fail-with-body "}
    with trio.fail_after(DEADLINE_SECS):
        async with terminal(tmp_path, replacements, forking_interpreter()) as typing:
            await typing.leave_running(page.next("omni-proxy replica --speech"))
            await healthy(f"http://127.0.0.1:{port}")
            body = json.loads(await typing.type(page.next("curl ")))
            assert "Paris" in body["choices"][0]["message"]["content"]
            await typing.type(page.next("curl "))
            assert (tmp_path / "question.wav").read_bytes().startswith(b"RIFF")
            transcript = json.loads(await typing.type(page.next("curl ")))["text"]
            assert "capital of France" in transcript


def test_the_other_commands_are_in_a_page_and_their_tests_exist():
    pages = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("replica", "weight-sync"))
    for line, test in ELSEWHERE.items():
        assert line in pages
        assert (ROOT / test).is_file()
