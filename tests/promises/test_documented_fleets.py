"""The pages about trainers and replicas, typed as they stand there, at real ones.

Only the places differ: ports, folders, and probes that come sooner. What can't run here or is run
by another test is named in ELSEWHERE, and `typed` proves that nothing else is left out.
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
from tests.promises.omni_program import missing
from tests.promises.replica_program import until
from tests.promises.terminal import terminal
from tests.tree import ROOT

pytestmark = pytest.mark.skipif(
    shutil.which("curl") is None
    or not all(map(importlib.util.find_spec, ("torch", "tiktoken", "safetensors"))),
    reason="curl, or a package of the replica, is not installed",
)
ELSEWHERE = {
    "omni-proxy replica --model tiny --port 31000 --kv-events 'tcp://*:5557' --kv-replay 'tcp://*:5558'": "tests/promises/test_kv_event_replica.py",
    "curl http://127.0.0.1:31000/kv_event_sources": "tests/promises/test_kv_event_replica.py",
    # It would fetch a gigabyte: what it installs is what these tests run with.
    "pip install '.[replica]'": "tests/test_docs.py",
    # Minutes, for 538 MB and a machine of its own: its parts are tested.
    "python -m tools.bench --weights": "tests/tools/test_bench_weights.py",
    "omni-proxy replica --model tiny --role prefill --kv-connector nixl --port 31000 "
    "--bootstrap-port 8998": "tests/promises/test_prefill_and_decode_replicas.py",
    "omni-proxy replica --model tiny --role decode --kv-connector nixl --port 31001": (
        "tests/promises/test_prefill_and_decode_replicas.py"
    ),
    "curl http://127.0.0.1:31000/v1/completions -H 'content-type: application/json' -d '"
    '{"prompt": "The sea", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}}'
    "'": "tests/promises/test_prefill_and_decode_replicas.py",
}
SOONER = "[health]\ninterval_secs = 0.3\nsuccess_threshold = 1\n"
DEADLINE_SECS = 240  # for a test that hangs, not a claim about speed


def fenced(page):
    """Each block with its language, "" for none."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def blocks(page, language):
    return [block for each, block in fenced(page) if each == language]


def commands(page):
    """Each command of the page, in its order: of a shell's block, and what is typed in others."""
    found = []
    for language, block in fenced(page):
        lines = block.replace("\\\n", " ").splitlines()
        if language == "sh":
            found += lines
        elif not language:
            found += [line.removeprefix("$ ") for line in lines if line.startswith(("curl ", "$ "))]
    return [line for line in found if line and line not in ELSEWHERE]


class Page:
    """Hands out the commands of a page, in the page's order and each once."""

    def __init__(self, name):
        self._left = commands(name)

    def next(self, beginning):
        line = self._left.pop(0)
        assert line.startswith(beginning), line
        return line

    @property
    def typed(self):
        """Whether every one was."""
        return not self._left


async def _written(folder):
    """By the stages, each of which stops by itself."""
    return [file for file in folder.glob("trace*") if file.stat().st_size]


async def routable(url, count):
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:

        async def holds():
            body = (await client.get("/workers")).json()
            known = [each for each in body["workers"] if each["weight_version"]]
            return body["routable_workers"] == count == len(known)

        await until(holds)


async def healthy(url):
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:

        async def holds():
            return (await client.get("/health")).status_code == 200

        await until(holds)


async def test_the_page_for_trainers_is_true_of_the_fleet_that_it_launches(tmp_path):
    page, port, first = Page("docs/trainers.md"), free_port(), free_run(2)
    url = f"http://127.0.0.1:{port}"
    asked = ("pause", "continue", "checksum", "status", "resolve")
    places = {f"weights {each}": f"weights {each} --url {url}" for each in asked}
    places["http://127.0.0.1:30000"] = url
    (text,) = blocks("docs/trainers.md", "toml")
    text = text.replace("[server]\n", f"[server]\nport = {port}\n")
    text = text.replace("replicas = 2\n", f"replicas = 2\nbase_port = {first}\n")
    (tmp_path / "proxy.toml").write_text(SOONER + text)
    shown_sums, shown_status = (
        block for block in blocks("docs/trainers.md", "") if "WORKER" in block
    )
    with trio.fail_after(DEADLINE_SECS):
        async with terminal(tmp_path, places, forking_interpreter()) as typing:
            await typing.leave_running(page.next("omni-proxy --config"))
            await routable(url, 2)
            (tmp_path / "example.py").write_text(blocks("docs/trainers.md", "python")[0])
            python = f"PROXY={url} PYTHONPATH={ROOT} {sys.executable} example.py"
            versions, by = (await typing.type(python)).splitlines()
            workers = [f"http://127.0.0.1:{each}" for each in (first, first + 1)]
            assert versions == str(dict.fromkeys(workers, "step-1"))
            assert by == "step-1"
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
    assert page.typed


async def test_the_page_of_weight_syncs_is_true_of_its_three_replicas_and_its_trainer(tmp_path):
    page, port, first = Page("docs/weight-sync.md"), free_port(), free_run(3)
    url = f"http://127.0.0.1:{port}"
    places = {
        "tools/trainer": f"{ROOT}/tools/trainer --endpoint {url}",
        "localhost:30000": f"127.0.0.1:{port}",
        "curl ": "curl --fail-with-body ",
        **{f"3100{number}": str(first + number) for number in range(3)},
    }
    (text,) = blocks("docs/weight-sync.md", "toml")
    text = text.partition("[[workers]]\n")[0]
    text = text.replace("[server]\n", f"[server]\nport = {port}\n")
    # The page's later commands are about versions that are kept, and come after more than two.
    text = text.replace('mode = "coordinate"', 'mode = "both"\nkeep_versions = 9')
    workers = "".join(
        f'[[workers]]\nurl = "http://127.0.0.1:{first + number}"\n' for number in range(3)
    )
    (tmp_path / "proxy.toml").write_text(SOONER + text + workers)
    head = blocks("docs/weight-sync.md", "")[0].splitlines()[1]
    with trio.fail_after(DEADLINE_SECS):
        async with terminal(tmp_path, places, forking_interpreter()) as typing:
            for beginning in ("for port in", "omni-proxy replica --model tiny --tp 2"):
                await typing.leave_running(page.next(beginning))
            await typing.leave_running(page.next("omni-proxy --config"))
            await routable(url, 3)
            lines = (await typing.type(page.next("tools/trainer --rounds 4"))).splitlines()
            assert lines[1].split() == head.split()
            assert [line.split()[0] for line in lines[2:]] == list("01234")
            assert all(" 3 equal " in line for line in lines[2:])
            # From now on as a fork: each start of the script imports torch for seconds.
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
    assert page.typed


async def test_a_replica_of_the_page_lives_in_two_processes_and_is_profiled(tmp_path):
    page, port = Page("docs/replica.md"), free_port()
    url = f"http://127.0.0.1:{port}"
    places = {
        "31000": str(port),
        "/tmp/": f"{tmp_path}/",
        "curl ": "curl -sS --fail-with-body ",
    }
    for _ in range(4):  # the model's, sound's: see below
        page.next(("omni-proxy replica --speech", "curl "))
    in_json = page.next("curl ")
    with trio.fail_after(DEADLINE_SECS):
        async with terminal(tmp_path, places, forking_interpreter()) as typing:
            await typing.leave_running(page.next("omni-proxy replica --model tiny --own-process"))
            await healthy(url)
            person = json.loads(await typing.type(in_json))["choices"][0]
            assert person["finish_reason"] == "length" or json.loads(person["message"]["content"])
            assert json.loads(await typing.type(page.next("curl ")))
            async with httpx.AsyncClient(
                base_url=url, trust_env=False, timeout=60, verify=False
            ) as client:
                for _ in range(2):  # some requests
                    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
                    answer = await client.post("/v1/chat/completions", json=body)
                    assert answer.status_code == 200
            assert json.loads(await typing.type(page.next("curl ")))
            output = await typing.type(page.next("omni-proxy replica profile"))
            (shown,) = (text for text in blocks("docs/replica.md", "") if "# Requests" in text)
            assert output.splitlines()[0] == shown.splitlines()[0]
            assert "scheduler_prefill_start->scheduler_prefill_end" in output
            for written in ("page.html", "report.json"):
                await typing.type(page.next("omni-proxy replica profile"))
                assert (tmp_path / written).stat().st_size > 500
            assert json.loads(await typing.type(page.next("curl ")))
            assert json.loads(await typing.type(page.next("curl ")))
            await until(partial(_written, tmp_path / "demo"))
            assert (tmp_path / "demo" / "events").is_dir()
    assert page.typed


@pytest.mark.replica
@pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")
async def test_the_documented_replica_serves_chat_speech_and_transcription(tmp_path):
    page, port = Page("docs/replica.md"), free_port()
    places = {"31000": str(port), "curl ": "curl -sS --fail-with-body "}
    with trio.fail_after(DEADLINE_SECS):
        async with terminal(tmp_path, places, forking_interpreter()) as typing:
            await typing.leave_running(page.next("omni-proxy replica --speech"))
            await healthy(f"http://127.0.0.1:{port}")
            body = json.loads(await typing.type(page.next("curl ")))
            assert "Paris" in body["choices"][0]["message"]["content"]
            await typing.type(page.next("curl "))
            assert (tmp_path / "question.wav").read_bytes().startswith(b"RIFF")
            heard = json.loads(await typing.type(page.next("curl ")))["text"]
            assert "capital of France" in heard


def test_what_is_run_elsewhere_stands_in_a_page_and_is_run_by_a_test_that_is_there():
    reported = "".join(
        (ROOT / f"docs/{page}.md").read_text() for page in ("replica", "weight-sync")
    )
    for line, test in ELSEWHERE.items():
        assert line in reported
        assert (ROOT / test).is_file()
