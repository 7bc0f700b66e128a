"""The same bytes, faster: native encoders and readers. Each equals its reference, and says so when it cannot serve."""
