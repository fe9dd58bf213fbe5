"""Show GPU, NIC and NUMA node of each rank; the same as ``megatron-switch check-binding``."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["check-binding", *sys.argv[1:]]))
