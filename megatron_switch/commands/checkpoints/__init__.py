"""The work of commands on checkpoints: convert, reshard, upcycle."""
