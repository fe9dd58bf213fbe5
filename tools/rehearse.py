"""The command ``megatron-switch rehearse`` of this checkout."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["rehearse", *sys.argv[1:]]))
