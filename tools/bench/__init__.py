"""What ``tools/bench_layer.py`` is made of: one layer, all implementations, one set of weights."""
