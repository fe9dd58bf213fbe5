"""Write the scripts that launch a training; the same as ``megatron-switch render-launch``."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["render-launch", *sys.argv[1:]]))
