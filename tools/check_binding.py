"""The command ``megatron-switch check-binding`` of this checkout."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["check-binding", *sys.argv[1:]]))
