"""Train Switch Transformers with Megatron-Core and its own training loop.

Importing this package has no effect: no patch, no environment write, no device query.
"""

__version__ = "0.1.0"
