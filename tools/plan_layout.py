"""Find the fastest layouts of a model on a cluster; the same as ``megatron-switch plan``."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
