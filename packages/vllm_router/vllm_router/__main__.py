"""`python -m vllm_router`."""

import sys

from vllm_router.launch_router import main

sys.exit(main())
