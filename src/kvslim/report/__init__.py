"""Report: one HTML page out of the JSON that the other verbs print."""
