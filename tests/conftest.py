"""Settings of all tests."""

from hypothesis import settings

# The same examples at every run and no clock: a shared machine may stall. `--hypothesis-profile=explore` looks further.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")
