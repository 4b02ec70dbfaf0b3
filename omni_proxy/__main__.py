"""`python -m omni_proxy` is `omni-proxy`."""

import sys

from omni_proxy.cli import main

sys.exit(main())
