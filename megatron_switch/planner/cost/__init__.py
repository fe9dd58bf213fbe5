"""Terms of a layout's cost in closed form: memory, arithmetic, traffic, time."""
