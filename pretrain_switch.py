#!/usr/bin/env python3
"""Train a Switch Transformer: the same as ``megatron-switch train``, for torchrun and SLURM."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
