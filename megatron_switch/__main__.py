"""``python -m megatron_switch COMMAND``: the same as the console script ``megatron-switch``."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main())
