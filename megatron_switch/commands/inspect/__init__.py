"""The work of commands that open a trained model: generate, experts, capacity-sweep."""
