"""The real program, which waits before each message of an upgrade: it creates the file NAME in the
folder of its first argument, and continues once NAME.go exists. It gets the other arguments."""

import sys
import time
from pathlib import Path

from omni_proxy.cli import main
from omni_proxy.upgrade.child_program import HandoverChannel


def wait_at_each_step(folder: Path) -> None:
    send = HandoverChannel.send

    def step(channel, message, descriptors=()):
        file = folder / type(message).__name__
        file.touch()
        while not Path(f"{file}.go").exists():
            time.sleep(0.01)  # noqa: TID251  # the program waits, too
        send(channel, message, descriptors)

    HandoverChannel.send = step


if __name__ == "__main__":
    wait_at_each_step(Path(sys.argv.pop(1)).parent)
    sys.exit(main())
