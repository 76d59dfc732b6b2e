"""One thread for each process: the tests start several, and more threads than cores would wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
