"""Random training programs on the hostile device."""
