"""The command ``megatron-switch reshard`` of this checkout."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["reshard", *sys.argv[1:]]))
