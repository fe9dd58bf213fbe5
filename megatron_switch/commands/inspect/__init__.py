"""The work of commands that open a trained model: generate, experts, evaluate, capacity-sweep."""
