"""Short scripts to copy and change. Each docstring begins with the command; tests/examples/ runs them."""
