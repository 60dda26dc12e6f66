"""Other servers and engines on the same machine: how to install, run and measure them beside Baton."""
