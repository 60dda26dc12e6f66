"""Stubs generated from proto/ by `make proto`; used only where bytes meet the rest of the code."""
