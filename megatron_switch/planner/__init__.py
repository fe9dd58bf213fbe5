"""Find the fastest layouts that fit a cluster: enumerate, bound, cost, rank, explain. No torch."""
