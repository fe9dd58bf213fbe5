"""Commands on checkpoints: convert, reshard, upcycle."""
