"""Small helpers below everything."""
