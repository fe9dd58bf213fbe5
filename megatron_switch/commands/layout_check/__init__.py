"""The work of check-layouts: train in every legal layout and compare with one rank."""
