"""Turn a dense checkpoint into a Switch model; the same as ``megatron-switch upcycle``."""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["upcycle", *sys.argv[1:]]))
