"""Rehearse a launch without a GPU; the same as ``megatron-switch rehearse``."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["rehearse", *sys.argv[1:]]))
