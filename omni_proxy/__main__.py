"""The entry point of `python -m omni_proxy` and of a frozen binary: the command `omni-proxy`."""

import sys

from omni_proxy.cli import main
from omni_proxy.cli.frozen_binary import prepare_frozen_binary

prepare_frozen_binary()
sys.exit(main())
