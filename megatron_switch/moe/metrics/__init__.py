"""Routing statistics: counted in the router, summed over ranks once a step, reported by layer."""
