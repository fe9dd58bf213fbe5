"""The command ``megatron-switch convert`` of this checkout."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
