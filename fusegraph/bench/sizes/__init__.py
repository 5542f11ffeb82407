"""Models and graphs at one random size after another, compiled once."""
