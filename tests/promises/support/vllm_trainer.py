"""A trainer with vLLM: vLLM's HTTP client for the calls, gloo for the tensors.

    python vllm_trainer.py URL VERSION=FOLDER[!dies|!name] …

vLLM's Python runs it. Each argument is a round: the weights of that folder with that label, in two
chunks whose boundary divides a layer that vLLM fuses. With `!dies` this process exits between them,
with `!name` the second one starts with a tensor that the model does not have. Prints one line of
JSON per round: why it failed, or "".
"""

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

PATIENCE = timedelta(seconds=60)


def joined(client, url, get):
    """Returns the group of all ranks behind `url`, in which this process is rank 0."""
    from torch._C._distributed_c10d import ProcessGroupGloo
    from torch.distributed import PrefixStore, TCPStore

    world = 1 + get(f"{url}/get_world_size").json()["world_size"]
    store = TCPStore("127.0.0.1", 0, world, True, PATIENCE, wait_for_workers=False)
    info = {
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": world,
    }
    calling = Calling(client.init_weight_transfer_engine, info)
    group = ProcessGroupGloo(
        PrefixStore(f"tcp://127.0.0.1:{store.port}", store), 0, world, PATIENCE
    )
    calling.wait()
    return group, store


class Calling(threading.Thread):
    """A call of the client in a thread."""

    def __init__(self, call, argument):
        super().__init__(daemon=True)
        self._call, self._argument, self._error = call, argument, None
        self.start()

    def run(self):
        try:
            self._call(self._argument)
        except Exception as error:
            self._error = error

    def wait(self):
        self.join()
        if self._error is not None:
            raise self._error


def send(client, group, tensors, version, fault):
    client.start_weight_update()
    names = list(tensors)
    middle = 1 + next(index for index, name in enumerate(names) if name.endswith("k_proj.weight"))
    for chunk in (names[:middle], names[middle:]):
        chunk_tensors = [tensors[name] for name in chunk]
        if fault == "name" and chunk[0] != names[0]:
            chunk, chunk_tensors = ["bogus"], chunk_tensors[:1]
        info = {
            "names": chunk,
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in chunk_tensors],
            "shapes": [list(tensor.shape) for tensor in chunk_tensors],
        }
        calling = Calling(client.update_weights, info)
        for tensor in chunk_tensors:
            group.broadcast(tensor.contiguous(), 0).wait()
        calling.wait()
        if fault == "dies":
            os._exit(9)
    client.finish_weight_update(version)


def main():
    import requests
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    url, *rounds = sys.argv[1:]
    client = HTTPVLLMWeightSyncClient(url, timeout=120)
    group = store = None
    for argument in rounds:
        version, _, rest = argument.partition("=")
        folder, _, fault = rest.partition("!")
        tensors = load_file(Path(folder) / "model.safetensors")
        why = ""
        try:
            if group is None:
                group, store = joined(client, url, requests.get)
            send(client, group, tensors, version, fault)
        except (requests.HTTPError, RuntimeError) as error:
            response = getattr(error, "response", None)
            why, group = (str(error) if response is None else response.text), None
        print(json.dumps({"version": version, "why": why}), flush=True)
    if group is not None:
        client.shutdown_weight_transfer_engine()
    del store


if __name__ == "__main__":
    main()
