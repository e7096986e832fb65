"""Measurements, side by side in one run: the CPU update against torch's, a whole step against a plain loop."""
