"""Other systems' settings as flags of this one: plain values in, flags and notes out."""
