"""Rewrite a checkpoint for another layout; the same as ``megatron-switch reshard``."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["reshard", *sys.argv[1:]]))
