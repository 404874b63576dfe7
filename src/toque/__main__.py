"""`python -m toque` is the `toque` command."""

import sys

from toque.cli import main

sys.exit(main())
