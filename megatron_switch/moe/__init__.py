"""The Switch layer: pure routing arithmetic (L2) and the modules around it (L3)."""
