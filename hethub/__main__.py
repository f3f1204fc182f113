"""`python -m hethub` is the same program as `hethub`."""

from hethub.cli import main

raise SystemExit(main())
