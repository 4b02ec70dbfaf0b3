"""Starts its router as slime, SkyRL, miles and NeMo-RL start theirs, and runs rollouts.

    python -m tests.promises.support.trainer_launchers FRAMEWORK FACTS_FILE URL URL ...

The code is new, but the imports, the calls and their order, and the values that are read are those
of the frameworks. It uses nothing of omni-proxy that those routers do not have, and writes its
results to FACTS_FILE as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, unquote

import httpx

PATIENCE_SECS = 90
LONG = 400  # tokens, more than the samples generate before their abort
SAMPLES = 8


def wait_until(holds, what):
    """Waits until `holds()` is true; returns its result."""
    deadline = time.monotonic() + PATIENCE_SECS
    while time.monotonic() < deadline:
        try:
            if result := holds():
                return result
        except httpx.RequestError:
            pass
        time.sleep(0.05)  # noqa: TID251  as a trainer does
    raise SystemExit(f"{what}: not within {PATIENCE_SECS} s")


class RouterProcess:
    """The child process that blocks in `launch_router`."""

    def __init__(self, target, *args, **options):
        self.process = multiprocessing.Process(target=target, args=args, daemon=True, **options)
        self.process.start()

    def wait_healthy(self, url, client):
        def is_healthy():
            assert self.process.is_alive(), f"the router exited with {self.process.exitcode}"
            return client.get(f"{url}/health").status_code == 200

        wait_until(is_healthy, "the router's health")

    def end(self, patience):
        """Terminates and joins the process, and kills it if that takes too long."""
        self.process.terminate()
        self.process.join(timeout=patience)
        killed = self.process.is_alive()
        if killed:
            self.process.kill()
            self.process.join()
        return {"exitcode": self.process.exitcode, "killed": killed}


# slime, miles and NeMo-RL: sglang_router.


def run_router(args):
    try:
        from sglang_router.launch_router import launch_router

        router = launch_router(args)
        return 1 if router is None else 0
    except Exception as error:
        print(error, file=sys.stderr)
        return 1


class SglangTrainer:
    """A trainer with the router at `url`, at which its engines register."""

    def __init__(self, engines, flags):
        self.engines, self.flags = engines, flags
        self.client = httpx.Client(timeout=PATIENCE_SECS, trust_env=False, verify=False)
        self.url = f"http://127.0.0.1:{flags.sglang_router_port}"

    def post(self, url, body, **headers):
        answer = self.client.post(url, json=body, headers=headers)
        answer.raise_for_status()
        return answer

    def register(self):
        import sglang_router

        assert [int(each) for each in sglang_router.__version__.split("+")[0].split(".")] >= [0, 3]
        for url in self.engines:
            self.post(f"{self.url}/workers", {"url": url, "worker_type": "regular"})
        wait_until(lambda: self.healthy() == set(self.engines), "engines")

    def healthy(self):
        listed = self.client.get(f"{self.url}/workers").json()["workers"]
        return {each["url"] for each in listed if each["is_healthy"]}

    def in_flight(self):
        listed = self.client.get(f"{self.url}/workers").json()["workers"]
        return sum(each["load"] for each in listed)

    def generate(self, session, tokens=8, rid=None):
        body = {
            "text": f"story {session}: once",
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": False,
            **({"rid": rid} if rid else {}),
        }
        answer = self.post(f"{self.url}/generate", body, **{"X-SMG-Routing-Key": session})
        meta = answer.json()["meta_info"]
        return {
            "reason": meta["finish_reason"]["type"],
            "version": meta["weight_version"],
            "header": answer.headers.get("x-omni-weight-version"),
            "worker": unquote(answer.headers.get("x-sglang-omni-worker", "")),
            "session": session,
        }

    def rollouts(self, pool):
        return list(pool.map(self.generate, [f"s{number % 4}" for number in range(SAMPLES)]))

    def aborted(self, pool, round_number):
        """Starts long samples on paused engines, and aborts them as partial rollouts are."""
        samples = [
            pool.submit(self.generate, f"s{number}", LONG, f"r{round_number}-{number}")
            for number in range(4)
        ]
        wait_until(lambda: self.in_flight() == len(samples), "long samples")
        self.abort(round_number)
        return [sample.result()["reason"] for sample in samples]

    def abort(self, round_number):
        """Aborts as slime does: in the first round at each engine that the router lists, then all
        requests at the router, then the requests of the round at the router."""
        if round_number == 0:
            for each in self.client.get(f"{self.url}/workers").json()["workers"]:
                self.post(f"{each['url']}/abort_request", {"abort_all": True})
        elif round_number == 1:
            self.post(f"{self.url}/abort_request", {"abort_all": True})
        else:
            body = {"rid": f"r{round_number}-", "prefix": True}
            self.post(f"{self.url}/abort_request", body)

    def update(self, version):
        body = {"model_path": self.flags.weights, "weight_version": version}
        result = self.post(f"{self.url}/update_weights_from_disk", body).json()
        assert result["success"], result

    def leave(self):
        for each in self.client.get(f"{self.url}/workers").json()["workers"]:
            deleted = self.client.delete(f"{self.url}/workers/{quote(each['id'], safe='')}")
            assert deleted.status_code in (200, 202), deleted.text
        wait_until(lambda: not self.healthy(), "engines to leave")


def slime(engines, facts):
    from sglang_router.launch_router import RouterArgs

    parser = argparse.ArgumentParser()
    parser.add_argument("--sglang-router-port", type=int)
    parser.add_argument("--prometheus", type=int)
    parser.add_argument("--weights")
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    flags = parser.parse_args(
        [*os.environ["TRAINER_FLAGS"].split(), "--router-policy", "consistent_hashing"]
    )
    router_args = RouterArgs.from_cli_args(flags, use_router_prefix=True)
    router_args.host = "127.0.0.1"
    router_args.port = flags.sglang_router_port
    router_args.prometheus_port = flags.prometheus
    router_args.request_timeout_secs = 600
    router_args.log_level = "warn"
    router_args.disable_circuit_breaker = True
    if hasattr(router_args, "disable_health_check"):
        router_args.disable_health_check = True
    trainer = SglangTrainer(engines, flags)
    router = RouterProcess(run_router, router_args)
    router.wait_healthy(trainer.url, trainer.client)
    trainer.register()
    with ThreadPoolExecutor(SAMPLES) as pool:
        facts["rounds"] = []
        for number in range(3):
            before = trainer.rollouts(pool)
            trainer.post(f"{trainer.url}/pause_generation", {"mode": "in_place"})
            aborted = trainer.aborted(pool, number)
            trainer.update(f"step-{number}")
            trainer.post(f"{trainer.url}/continue_generation", {})
            facts["rounds"].append({"before": before, "aborted": aborted})
        facts["last"] = trainer.rollouts(pool)
    metrics = trainer.client.get(f"http://127.0.0.1:{flags.prometheus}/metrics").text
    facts["metrics"] = "omni_proxy_requests_total{" in metrics
    trainer.leave()
    facts["end"] = router.end(1.0)


def nemo_rl(engines, facts):
    """Sets attributes that no release has, with a quiet log."""
    from sglang_router.launch_router import RouterArgs

    parser = argparse.ArgumentParser()
    parser.add_argument("--sglang-router-port", type=int)
    parser.add_argument("--prometheus", type=int)
    parser.add_argument("--weights")
    flags = parser.parse_args(os.environ["TRAINER_FLAGS"].split())
    router_args = RouterArgs()
    router_args.host = "127.0.0.1"
    router_args.port = flags.sglang_router_port
    router_args.router_policy = "round_robin"
    router_args.prometheus_port = flags.prometheus
    router_args.log_level = "warn"
    trainer = SglangTrainer(engines, flags)
    multiprocessing.set_start_method("spawn")
    router = RouterProcess(run_router, router_args)
    router.wait_healthy(trainer.url, trainer.client)
    trainer.register()
    with ThreadPoolExecutor(SAMPLES) as pool:
        facts["last"] = trainer.rollouts(pool)
    facts["end"] = router.end(1.0)


# SkyRL: vllm_router.


def run_router_with_logging(router_args, log_file):
    from vllm_router.launch_router import launch_router

    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)
    launch_router(router_args)


class SkyRlClient:
    """SkyRL's client: with an external proxy, both data and control requests go to it."""

    def __init__(self, proxy_url, weights):
        self.url, self.weights = proxy_url, weights
        self.client = httpx.Client(timeout=PATIENCE_SECS, trust_env=False, verify=False)

    def post(self, path, body=None, **options):
        answer = self.client.post(f"{self.url}{path}", json=body, **options)
        answer.raise_for_status()
        return answer

    def chat(self, session):
        body = {
            "messages": [{"role": "user", "content": f"trajectory {session}"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = self.post("/v1/chat/completions", body, headers={"X-Session-ID": session})
        return {
            "reason": answer.json()["choices"][0]["finish_reason"],
            "text": answer.json()["choices"][0]["message"]["content"],
            "end": answer.headers.get("x-omni-weight-version-end"),
            "header": answer.headers.get("x-omni-weight-version"),
            "worker": unquote(answer.headers.get("x-sglang-omni-worker", "")),
            "session": session,
        }

    def trajectories(self, pool):
        return list(pool.map(self.chat, [f"t{number % 4}" for number in range(SAMPLES)]))

    def finish_session(self, session):
        """Ends a session; SkyRL only logs an error of this call."""
        path = f"/finish_session?session_id={quote(session)}"
        return self.client.post(f"{self.url}{path}", timeout=10).status_code

    def tokens(self, session):
        """Generates from tokens by the route that trainers' renderers use."""
        request = {"prompt": f"trajectory {session}", "model": self.model}
        token_ids = self.post("/tokenize", request).json()["tokens"]
        body = {
            "token_ids": token_ids,
            "model": self.model,
            "sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True},
        }
        answer = self.post("/inference/v1/generate", body, headers={"X-Session-ID": session})
        return {
            "tokens": len(answer.json()["choices"][0]["token_ids"]),
            "header": answer.headers.get("x-omni-weight-version"),
        }

    @property
    def model(self):
        return self.client.get(f"{self.url}/v1/models").json()["data"][0]["id"]

    def update(self, version):
        self.post("/pause?mode=keep")
        paused = self.client.get(f"{self.url}/is_paused").json()["is_paused"]
        body = {"model_path": self.weights, "weight_version": version}
        self.post("/update_weights_from_disk", body)
        self.post("/resume")
        resumed = not self.client.get(f"{self.url}/is_paused").json()["is_paused"]
        version_label = self.client.get(f"{self.url}/weight_info").json()["weight_version"]
        return [paused, resumed, version_label]


def skyrl(engines, facts):
    from vllm_router.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    parser.add_argument("--sglang-router-port", dest="port", type=int)
    parser.add_argument("--prometheus", type=int)
    parser.add_argument("--weights")
    flags = parser.parse_args(os.environ["TRAINER_FLAGS"].split())
    router_args = RouterArgs(
        host="127.0.0.1", port=flags.port, policy="consistent_hash", worker_urls=list(engines)
    )
    router_args.prometheus_port = flags.prometheus
    log_file = Path(os.environ["TRAINER_LOG"])
    url = f"http://127.0.0.1:{router_args.port}"
    skyrl_client = SkyRlClient(url, flags.weights)
    router = RouterProcess(run_router_with_logging, router_args, str(log_file), name="vllm-router")
    router.wait_healthy(url, skyrl_client.client)
    is_pd = router_args.vllm_pd_disaggregation or router_args.pd_disaggregation
    facts["is_pd"] = is_pd
    with ThreadPoolExecutor(SAMPLES) as pool:
        facts["rounds"] = []
        for number in range(2):
            before = skyrl_client.trajectories(pool)
            # Fully asynchronous: trajectories continue while the weights change.
            running = [
                pool.submit(skyrl_client.chat, f"t{each % 4}") for each in range(4 * SAMPLES)
            ]
            update_result = skyrl_client.update(f"step-{number}")
            during = [each.result() for each in running]
            facts["rounds"].append({"before": before, "during": during, "reported": update_result})
        facts["last"] = skyrl_client.trajectories(pool)
        facts["tokens"] = list(pool.map(skyrl_client.tokens, ["t0", "t1"]))
    facts["world_size"] = skyrl_client.client.get(f"{url}/get_world_size").json()["world_size"]
    facts["finished"] = [skyrl_client.finish_session(f"t{number}") for number in range(4)]
    facts["end"] = router.end(5.0)
    facts["log"] = log_file.read_text()


FRAMEWORKS = {"slime": slime, "nemo_rl": nemo_rl, "skyrl": skyrl}


def main():
    framework, file, *engines = sys.argv[1:]
    facts: dict = {}
    FRAMEWORKS[framework](engines, facts)
    Path(file).write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
