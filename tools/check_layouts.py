"""The command ``megatron-switch check-layouts`` of this checkout."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["check-layouts", *sys.argv[1:]]))
