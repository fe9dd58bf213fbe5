"""The command ``megatron-switch render-launch`` of this checkout."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["render-launch", *sys.argv[1:]]))
