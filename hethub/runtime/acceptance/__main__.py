"""Short training runs of the acceptance test: `python -m hethub.runtime.acceptance PART…` (repeats, speed, memory)."""

import os

from hethub.runtime.launch.launcher_environment import launcher_of

launcher_of(os.getpid())  # before torch is imported, which takes seconds: who started this may be gone by then

from hethub.runtime.acceptance.training import main  # noqa: E402

main()
