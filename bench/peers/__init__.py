"""What users would pick instead, on the same machine: how to install it, run it and measure it beside Baton."""
