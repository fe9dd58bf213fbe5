"""Translate a DeepSpeed run into flags; the same as ``megatron-switch from-deepspeed``."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["from-deepspeed", *sys.argv[1:]]))
