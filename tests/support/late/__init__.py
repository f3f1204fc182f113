"""A late device for the tests, and mutants that lack a wait. Start reading: device.py."""
