"""The command ``megatron-switch from-deepspeed`` of this checkout."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["from-deepspeed", *sys.argv[1:]]))
