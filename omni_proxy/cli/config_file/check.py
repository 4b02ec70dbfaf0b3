"""`omni-proxy check FILE`: validates a configuration file. Binds and starts nothing."""

import json
import os
import sys
from collections.abc import Sequence
from itertools import chain

from omni_proxy.admin_ops.admin_route_table import check_routes
from omni_proxy.api_keys.key_table import KeyReader, resolve
from omni_proxy.cli.flags.start_parsers import check_parser
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.problem import Path, Problem, format_path
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import KeySource
from omni_proxy.fleet.worker import adapter_names
from omni_proxy.routing.policies.plugins import check_policy
from omni_proxy.runtime_config.config_store import check_extras, read_file
from omni_proxy.runtime_config.key_sources import read_key_file
from omni_proxy.system.tls_contexts import check_tls_files
from omni_proxy.upstream_http.resolver import reject_own_addresses


def main(argv: Sequence[str]) -> int:
    arguments = check_parser().parse_args(argv)
    try:
        config = read_file(arguments.file)
        check_tls_files(config, str(arguments.file))
        check_routes(config, str(arguments.file))
        check_policy(config, str(arguments.file))
        check_extras(config, str(arguments.file))
        reject_own_addresses(config, (), str(arguments.file))
        file = str(arguments.file)
        notes = [*check_keys(config, file), *alias_notes(config), *model_notes(config)]
    except ConfigError as error:
        if arguments.json:
            print(json.dumps({"ok": False, **error.as_dict()}, indent=2))
        else:
            print(error, file=sys.stderr)
            print(f"refused: {_counted(len(error.problems), 'problem')}", file=sys.stderr)
        return 2
    if arguments.json:
        result = {"ok": True, "file": str(arguments.file), "problems": []}
        print(json.dumps(result | ({"notes": notes} if notes else {}), indent=2))
    else:
        for note in notes:
            print(f"{arguments.file}: note: {note}", file=sys.stderr)
        print(f"{arguments.file}: ok; {_summary(config)}")
    return 0


def check_keys(config: Config, file: str) -> list[str]:
    """Notes about key variables that are not set in this environment, which may not be the proxy's.
    Raises ConfigError for key files that can't be used."""
    reader = KeyReader(os.environ, read_key_file)
    problems: list[Problem] = []
    unset: dict[str, str] = {}
    lists: tuple[tuple[Path, Sequence[KeySource]], ...] = (
        (("keys",), config.keys),
        (("admin", "keys"), config.admin.keys),
    )
    for path, entries in lists:
        for index, entry in enumerate(entries):
            if entry.key_env and not os.environ.get(entry.key_env):
                unset[format_path((*path, index, "key_env"))] = entry.key_env
        _, findings = resolve(entries, path, reader)
        problems += [
            Problem(where, None, reason, hint, file)
            for place, reason, hint in findings
            if (where := format_path(place)) not in unset
        ]
    if problems:
        raise ConfigError(problems, file)
    return [f"{place}: {name} is not set here; the proxy needs it" for place, name in unset.items()]


def alias_notes(config: Config) -> list[str]:
    """Notes about alias targets that no worker of the file serves. Empty if the file can't list all
    models: with discovered workers, or adapters that engines report."""
    loras = [worker.loras for worker in config.workers]
    if config.discover or "auto" in loras:
        return []
    named_models = [worker.model for worker in config.workers] + [
        group.model for group in config.launch
    ]
    models = {model or config.routing.model for model in named_models} - {""}
    if not models:  # workers without a model take any request
        return []
    known = set(models)
    for lora in chain.from_iterable(loras):
        known.update(adapter_names(lora, models))
    return [
        f"{format_path(('routing', 'models', index, 'targets', place, 'model'))}: "
        f"no worker of this file has the model {target.model!r}"
        for index, alias in enumerate(config.routing.models)
        for place, target in enumerate(alias.targets)
        if target.model not in known
    ]


def model_notes(config: Config) -> list[str]:
    """Notes about workers without a model, if other workers have one."""
    if config.routing.model:
        return []
    models = [
        (f"workers[{i}]", entry.model or entry.loras) for i, entry in enumerate(config.workers)
    ]
    models += [(f"launch[{i}]", entry.model) for i, entry in enumerate(config.launch)]
    models += [
        (f"discover[{i}]", entry.model or entry.model_label)
        for i, entry in enumerate(config.discover)
    ]
    unnamed = [place for place, model in models if not model]
    if len(unnamed) == len(models):
        return []
    reason = "it gets no request that names a model, because other workers have one"
    return [f"{place}: has no model: {reason}" for place in unnamed]


def _summary(config: Config) -> str:
    server = config.server
    where = server.host if server.host.startswith("unix:") else f"{server.host} port {server.port}"
    replicas = sum(group.replicas for group in config.launch)
    sources = len(config.discover)
    discovered = f"{_counted(sources, 'source')} of discovery, " if sources else ""
    return (
        f"{_counted(len(config.workers), 'worker')} named, {discovered}"
        f"{_counted(replicas, 'replica')} launched, policy {config.routing.policy}, "
        f"listens on {where}{' with TLS' if server.tls_cert else ''}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
