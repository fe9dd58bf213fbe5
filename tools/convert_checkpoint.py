"""Convert checkpoints to and from other formats; the same as ``megatron-switch convert``."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
