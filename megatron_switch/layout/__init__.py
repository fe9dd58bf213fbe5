"""Rank grids and closed-form sizes: standard library only, answers at once anywhere."""
