"""Engines that load weights from a path, and a rollout over two of them."""

import json

import trio

from omni_proxy.weight_sync.rollout.request import parse_rollout
from omni_proxy.weight_sync.rollout.service import RolloutCall
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import UPDATE, GatedEngines

CHECKER, PROBE, INFO = "/weights_checker", "/health_generate", "/model_info"
BODY = {"model_path": "/m/v2", "weight_version": "v2"}


class LoadingEngines(GatedEngines):
    """Each engine has a path, and a label and checksum that follow from what it loads."""

    def __init__(self):
        super().__init__()
        self.paths_held = {A: "/m/v1", B: "/m/v1"}
        self.sums = {A: "/m/v1", B: "/m/v1"}
        self.broken_loads = set()  # (URL, path): loads that result in a wrong checksum

    async def answer(self, request):
        url = str(request.url.copy_with(raw_path=b"/")).rstrip("/")
        if request.url.path == UPDATE and (url, UPDATE) not in self.replies:
            body = json.loads(request.content)
            self.paths_held[url], self.labels[url] = body["model_path"], body["weight_version"]
            self.sums[url] = body["model_path"]
            if (url, body["model_path"]) in self.broken_loads:
                self.sums[url] = "something else"
        return await super().answer(request)

    def default_response(self, url, path):
        if path == INFO:
            return {"weight_version": self.labels[url], "model_path": self.paths_held[url]}
        return super().default_response(url, path)

    def loaded(self, url):
        port = int(url.rpartition(":")[2])
        requests = [r for r in self.requests if r.url.path == UPDATE and r.url.port == port]
        return [json.loads(request.content)["model_path"] for request in requests]


async def start_rollout(api, **fields):
    return await api.operations.start_rollout(
        RolloutCall(parse_rollout({**BODY, **fields}), None, "me")
    )


async def ended_rollout(api):
    """Wait until the rollout has ended; return its status."""
    progress = api.operations.rollouts.progress
    with trio.fail_after(20):
        while progress.active is not None:
            await progress.changed.wait()
    return progress.to_dict()


async def rollout_when(api, condition):
    """Wait until `condition(rollout)`; return the status of the rollout."""
    progress = api.operations.rollouts.progress
    with trio.fail_after(20):
        while not condition(progress.to_dict()):
            await progress.changed.wait()
    return progress.to_dict()


def states(rollout):
    return [row["state"] for row in rollout["workers"]]


def versions(api):
    return [(worker.weight_label, worker.weight_epoch) for worker in api.fleet.workers]
