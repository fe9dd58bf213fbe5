"""The command ``megatron-switch plan`` of this checkout."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
