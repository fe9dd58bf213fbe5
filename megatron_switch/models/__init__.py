"""Whole models: layer specs, norms and attention that need neither TE nor Apex."""
