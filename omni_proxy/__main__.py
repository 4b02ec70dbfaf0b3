"""`python -m omni_proxy` is `omni-proxy`; so is a frozen binary."""

import sys

from omni_proxy.cli import main
from omni_proxy.cli.frozen_binary import prepare_frozen_binary

prepare_frozen_binary()
sys.exit(main())
