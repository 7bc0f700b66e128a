"""Store: owns bytes, does no arithmetic on values."""
