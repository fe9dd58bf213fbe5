"""The command ``megatron-switch upcycle`` of this checkout."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["upcycle", *sys.argv[1:]]))
