"""What every process here should have, and those that it starts.

torch asks the DNS for the name of each address that it connects to or hears from, 127.0.0.1 too:
where an answer gets lost, that takes 5 s unless somebody says less.
"""

import os

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
