"""A model as one record: its flags, presets and parameter counts. Plain values, no torch."""
