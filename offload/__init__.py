"""Memory and movement: where KV rows are stored, and how chosen rows get to the device that attends to them."""
