"""Memory and movement: where KV rows live and how the chosen ones get to where they are attended."""
