"""`python -m sglang_router`."""

import sys

from sglang_router.cli import main

sys.exit(main())
