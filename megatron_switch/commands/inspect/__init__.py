"""Commands that open a trained model: generate, experts, capacity-sweep."""
