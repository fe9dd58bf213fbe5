"""Check that every layout computes what one rank does: ``megatron-switch check-layouts``.

Usage: python tools/check_layouts.py [--quick] [--max-ranks N] [--json] [--device cuda]
"""

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["check-layouts", *sys.argv[1:]]))
