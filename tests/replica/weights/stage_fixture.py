"""A text stage with all its weight operations, in its own loop, and files of other weights."""

from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from omni_proxy.replica.models import tiny
from omni_proxy.replica.pipeline.messages import Admin, AdminResult, Result
from omni_proxy.replica.text.stage import build
from omni_proxy.weight_sync.checksum import roll_up, tensor_digest
from tests.replica.text.scheduler_harness import Loop, submission


def weights_of(seed: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Every tensor of the tiny model of `seed`, each in its own memory."""
    model = tiny.build(seed)
    return {name: each.detach().clone().to(dtype) for name, each in model.named_parameters()}


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


def checksum_of(tensors: dict[str, torch.Tensor]) -> str:
    """The checksum of a rank with exactly these tensors, computed without a model."""
    return roll_up(
        {
            name: tensor_digest(name, str(each.dtype), each.shape, each.numpy().tobytes())
            for name, each in tensors.items()
        }
    )


class Stage:
    """Operations one by one, and greedy texts."""

    def __init__(self, scheduler, loop):
        self.scheduler = scheduler
        self.loop = loop
        self.seen = []  # all messages, newest last
        self._count = 0

    def next(self, kind, holds=lambda reported: True):
        def seen(reported):
            self.seen.append(reported)
            return isinstance(reported, kind) and holds(reported)

        return self.loop.next(object, seen)

    def send(self, action, payload=None, /, **more) -> str:
        self._count += 1
        op_id = f"op-{self._count}"
        self.loop.inbox.put(Admin(op_id, action, (payload or {}) | more))
        return op_id

    def answer(self, op_id) -> AdminResult:
        return self.next(AdminResult, lambda reported: reported.op_id == op_id)

    def admin(self, action, payload=None, /, **more) -> AdminResult:
        return self.answer(self.send(action, payload, **more))

    def update(self, path, **more) -> AdminResult:
        return self.admin("update_weights_from_disk", model_path=str(path), **more)

    def checksum(self) -> str:
        return self.admin("weights_checker").data["per_gpu_checksum"]

    def facts(self) -> dict:
        return self.admin("model_info").data

    def submit(self, **params) -> str:
        self._count += 1
        request_id = f"r-{self._count}"
        greedy = {"temperature": 0, "max_new_tokens": 12}
        self.loop.inbox.put(submission(request_id, **greedy | params))
        return request_id

    def result(self, request_id) -> dict:
        """The answer to an operation, also if it was received while another one was awaited."""
        for message in self.seen:
            if isinstance(message, Result) and message.request_id == request_id:
                return message.data
        return self.next(Result, lambda message: message.request_id == request_id).data

    def generate(self, **params) -> dict:
        return self.result(self.submit(**params))


@contextmanager
def running(**params):
    scheduler = build("decode", model="tiny", seed=0, **params)
    with Loop(scheduler) as loop:
        yield Stage(scheduler, loop)
