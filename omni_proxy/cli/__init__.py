"""From the words of the command line to an exit status: 0 fine, 2 refused before anything ran.

The first word picks the command; without one of these words it is `serve`. Commands are imported
when they run: `omni-proxy check` must not wait for a model runtime.
"""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    match words:
        case ["check", *rest]:
            from omni_proxy.cli.check import main as check

            return check(rest)
        case ["replica", *rest]:
            from omni_proxy.replica.command import main as replica

            return replica(rest)
        case ["launch", *rest]:
            from omni_proxy.cli.launch import main as launch

            return launch(rest)
        case ["launch-router", *rest]:
            from omni_proxy.cli.launch import main_router as launch_router

            return launch_router(rest)
        case ["weights", *rest]:
            from omni_proxy.cli.weights import main as weights

            return weights(rest)
        case ["serve", *rest]:
            words = rest
    from omni_proxy.cli.serve import main as serve

    return serve(words)
