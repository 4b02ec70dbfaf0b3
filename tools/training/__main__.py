"""tools/trainer: train a few steps, sync the weights to a fleet, and verify that it serves them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence

# Set before torch is imported: waiting threads must not spin, and all ranks of an NCCL group need
# the same value of the second one (note:two-phase 1.2).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
# torch looks up the DNS name of each address; if answers get lost, each lookup would take 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

import torch

from omni_proxy.cli.client.admin_client import KEY_VARIABLE
from omni_proxy.cli.client.tls_options import ClientCertError, client_cert_of
from tools.training.arguments import deadline_of, sync_options, understood
from tools.training.endpoint import Endpoint
from tools.training.faults import FAULTS, NONE, Fault, Stops, TwoAtOnce
from tools.training.learner import QUESTION, Learner
from tools.training.readiness import wait_ready
from tools.training.rounds import HEAD, Round, Training, shown

GOOD, FAILED, MISUNDERSTOOD, TOO_LATE = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    arguments = understood(argv)
    _end_at(deadline_of(arguments))
    torch.set_num_threads(1)
    try:
        endpoint = _endpoint(arguments)
    except ClientCertError as fault:
        print(f"tools/trainer: {fault}", file=sys.stderr)
        return MISUNDERSTOOD
    learner = Learner(arguments.model, steps=arguments.steps)
    training = Training(endpoint, learner, sync_options(arguments))
    try:
        wait_ready(endpoint, arguments.wait_secs, _print_waiting)
        endpoint.ranks()
    except ValueError as error:
        print(f"tools/trainer: {error}", file=sys.stderr)
        return FAILED
    good = _train(training, arguments)
    training.close()
    return GOOD if good else FAILED


def _endpoint(arguments: argparse.Namespace) -> Endpoint:
    """Raises ClientCertError."""
    certificate, url = client_cert_of(arguments), arguments.endpoint
    if certificate and not url.startswith("https:"):
        raise ClientCertError(f"--ca and --client-cert are for https, and --endpoint is {url}")
    key = arguments.api_key or os.environ.get(KEY_VARIABLE, "")
    return Endpoint(url, arguments.timeout_secs, certificate=certificate, key=key)


def _train(training: Training, arguments: argparse.Namespace) -> bool:
    if not arguments.json:
        print(f"asked each time: {QUESTION}\n{shown(HEAD)}")
    _print_round(training.before(), arguments.json)
    good = True
    for number in range(1, arguments.rounds + 1):
        fault = _fault(arguments) if number == arguments.rounds else FAULTS[NONE]()
        done = training.round(number, fault)
        _print_round(done, arguments.json)
        _print_second_trainer(fault)
        good = good and done.good
    return good


def _fault(arguments: argparse.Namespace) -> Fault:
    fault = FAULTS[arguments.fault]()
    if isinstance(fault, Stops):
        fault.secs = arguments.stop_secs
    return fault


def _print_round(done: Round, as_json: bool) -> None:
    print(json.dumps(done.to_dict()) if as_json else done.row(), flush=True)
    if done.why and not as_json:
        print(f"  failed: {done.why}", file=sys.stderr, flush=True)


def _print_waiting(why: str) -> None:
    print(f"waiting for the endpoint: {why}", file=sys.stderr, flush=True)


def _print_second_trainer(fault: Fault) -> None:
    if isinstance(fault, TwoAtOnce) and fault.answer is not None:
        answered = f"{fault.answer.status} {fault.answer.why}"
        print(f"  the second trainer got: {answered}", file=sys.stderr, flush=True)


def _end_at(secs: float) -> None:
    """End the process after `secs`: nothing else ends a gloo broadcast that hangs."""

    def end() -> None:
        print(f"tools/trainer: not done after {secs:g} s", file=sys.stderr, flush=True)
        os._exit(TOO_LATE)

    timer = threading.Timer(secs, end)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # A join that never completes can't be interrupted, and torch would wait for its thread.
    os._exit(status)
