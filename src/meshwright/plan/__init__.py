"""The search for a layout, with what explains and checks it."""
