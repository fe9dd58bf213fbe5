"""What a run says and writes: banner, console, metrics file, warnings, run folder."""
